"""Tells how the caller's code uses a call's result.

The result is dropped, is a statement of its own, or is used.
"""

from __future__ import annotations

import dis
from types import FrameType

_CACHE = dis.opmap.get("CACHE", -1)
_POP_TOP = dis.opmap["POP_TOP"]


def is_dropped(frame: FrameType) -> bool:
    """Returns whether the result of the call that `frame` waits for is thrown away.

    Then the call is a statement of its own. The last expression of a notebook's cell is not thrown away, it is shown.
    """
    raw, offset = frame.f_code.co_code, frame.f_lasti + 2
    while offset < len(raw) and raw[offset] == _CACHE:
        offset += 2
    return offset < len(raw) and raw[offset] == _POP_TOP
