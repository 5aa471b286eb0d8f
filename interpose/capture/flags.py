"""The flags that compile text as running code was compiled."""

from __future__ import annotations
import __future__

from types import CodeType

_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag


def future_flags(code: CodeType) -> int:
    """The flags of the ``from __future__`` imports that `code` was compiled with."""
    return code.co_flags & _FUTURE
