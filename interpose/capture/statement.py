"""How a call's result is used, seen from the caller's code: dropped, as an expression that is a statement, or used."""

from __future__ import annotations

import dis
import sys
from types import FrameType

_CACHE = dis.opmap.get("CACHE", -1)
_POP_TOP = dis.opmap["POP_TOP"]


def caller(package: str) -> FrameType:
    """Returns the frame that called into a package: the innermost one that is not the package's own code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame = frame.f_back
    return frame


def is_dropped(frame: FrameType) -> bool:
    """Whether the result of the call that `frame` waits for is thrown away: the call is a statement of its own.

    The last expression of a notebook's cell is not thrown away, it is shown.
    """
    raw, offset = frame.f_code.co_code, frame.f_lasti + 2
    while offset < len(raw) and raw[offset] == _CACHE:
        offset += 2
    return offset < len(raw) and raw[offset] == _POP_TOP
