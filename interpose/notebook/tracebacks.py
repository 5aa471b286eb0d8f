"""Tracebacks of calls end at the notebook's own line, in plain Python, IPython and pytest.

A block's error is raised in the frame of its `with` (`interpose.contract.tracebacks`). A call cannot do that, so its frames are
left out where the traceback is shown.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from interpose.contract.errors import InterposeError
from interpose.contract.tracebacks import are_full, cut


def install() -> None:
    """Leave the library's frames out of the tracebacks that this process shows. Idempotent."""
    if "_pytest" in sys.modules:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "interpose":
                module.__dict__["__tracebackhide__"] = _hidden
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Shows an error as the hook before does, without the library's frames."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        cut(error)
        self._before(kind, error, error.__traceback__)


def _hidden(info: Any) -> bool:
    """Whether pytest leaves out the frames of the library for an error."""
    return not are_full() and isinstance(getattr(info, "value", None), InterposeError)
