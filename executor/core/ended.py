"""How a block ended: what workers tell the scheduler and the engine of it."""

from __future__ import annotations

import enum


class Ended(enum.StrEnum):
    """How a block ended.

    Between processes a member may travel as its text; `Ended(text)` gives the member back.

    Attributes:
        DONE: its code ran to the end.
        STOPPED: it called `tracer.stop()`.
        FAILED: it raised, was broken off, or could not be bound.
        CANCELLED: it was ended without a result.
        READ_ONLY: it needs no further step and changed nothing: its request goes on as a plain request.
        UNKNOWN: the worker has no such block.
    """

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    READ_ONLY = "read only"
    UNKNOWN = "unknown"


# How a block ended, the serialized events for the client, and how many times the block printed.
Ending = tuple[Ended, list[bytes], int]
