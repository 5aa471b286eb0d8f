"""Which block it is: the request, the trace and the invoke that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of one block.

    Attributes:
        request_id: the engine's id of the request; a key of its own for a standing edit and for a joint block.
        trace_id: the trace.
        invoke: the invoke's index in the trace.
        gang: how many invokes of the trace start together with the block, itself included; 0: none does.
        joint: whether the block has no prompt and sees the rows of its gang.
        edit: the name of the standing edit that the block is, "" for a request's own block.
        owner: the engine's id of the request that the edit runs in, "" for a request's own block.
        rank: the place among the blocks of one request; a request's own block has 0, edits come before it.
    """

    request_id: str
    trace_id: str
    invoke: int
    gang: int = 0
    joint: bool = False
    edit: str = ""
    owner: str = ""
    rank: int = 0
