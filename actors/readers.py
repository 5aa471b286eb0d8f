"""The calls of clients that read a trace."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Readers:
    """The calls of clients that read a trace.

    Attributes:
        followers: ids of the calls that read the events now; a trace without a follower is cancelled.
        read: whether a client has read the events to their end.
        fetched: blob ids of the saved values that a client has received completely.
        abandoned: whether the trace was cancelled because no call followed it.
    """

    followers: set[str] = field(default_factory=set)
    read: bool = False
    fetched: set[str] = field(default_factory=set)
    abandoned: bool = False
