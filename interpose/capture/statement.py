"""How a call's result is used, seen from the caller's code: dropped, as an expression that is a statement, or used."""

from __future__ import annotations

import dis
from types import FrameType

_CACHE = dis.opmap.get("CACHE", -1)
_POP_TOP = dis.opmap["POP_TOP"]


def is_dropped(frame: FrameType) -> bool:
    """Whether the result of the call that `frame` waits for is thrown away: the call is a statement of its own.

    The last expression of a notebook's cell is not thrown away, it is shown.
    """
    raw, offset = frame.f_code.co_code, frame.f_lasti + 2
    while offset < len(raw) and raw[offset] == _CACHE:
        offset += 2
    return offset < len(raw) and raw[offset] == _POP_TOP
