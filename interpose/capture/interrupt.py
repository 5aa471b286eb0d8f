"""Raises an exception in a running frame, before the frame's next instruction.

From Python 3.12 on, `sys.monitoring` does that for one code object, past any debugger or coverage tool. Before, the
frame's trace function does, and what traced the frame and its thread is put back afterwards. (`sys.settrace` with
opcode events is no way on 3.12: with several threads it crashes the interpreter.)
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

# Instructions of an `async with` that come before the block's guard is in place.
_UNGUARDED = frozenset(code for name, code in dis.opmap.items() if name in ("END_SEND", "SETUP_ASYNC_WITH"))


def interrupt(frame: FrameType, signal: BaseException) -> Callable[[], None]:
    """Arranges that `signal` is raised in `frame` at its next instruction.

    `frame` must be a caller of this function, in this thread. Returns what has to be called afterwards, raised or not,
    to put everything back as it was.

    Raises RuntimeError where that cannot be arranged.
    """
    if sys.version_info >= (3, 12):
        return _Monitored(frame, signal).undo
    return _Traced(frame, signal).undo


class _Traced:
    """The trace functions of a frame and its thread, replaced and put back."""

    def __init__(self, frame: FrameType, signal: BaseException):
        self._frame = frame
        self._signal = signal
        self._tracing = False
        self._before = sys.gettrace(), frame.f_trace, frame.f_trace_opcodes
        frame.f_trace = self._trace
        frame.f_trace_opcodes = True
        sys.settrace(self._called)
        _probe()
        if not self._tracing:
            self.undo()
            raise RuntimeError("tracing is suspended: the code runs inside a trace function")

    def undo(self) -> None:
        thread, local, self._frame.f_trace_opcodes = self._before
        if local is None:
            del self._frame.f_trace
        else:
            self._frame.f_trace = local
        sys.settrace(thread)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        self._tracing = True

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event in ("opcode", "line") and frame.f_code.co_code[frame.f_lasti] not in _UNGUARDED:
            raise self._signal
        return self._trace


def _probe() -> None:
    """Is called to see whether calls are traced."""


if sys.version_info >= (3, 12):
    _events = sys.monitoring.events
    _lock = threading.Lock()
    _pending: dict[FrameType, BaseException] = {}
    _uses: dict[int, int] = {}  # by the id of a code object that a pending frame keeps alive
    _tool: int | None = None

    class _Monitored:
        """Instruction events of one code object, while a frame that runs it waits for its exception."""

        def __init__(self, frame: FrameType, signal: BaseException):
            self._frame = frame
            code = frame.f_code
            with _lock:
                tool = _claim_tool()
                _pending[frame] = signal
                _uses[id(code)] = _uses.get(id(code), 0) + 1
                if _uses[id(code)] == 1:
                    sys.monitoring.set_local_events(tool, code, _events.INSTRUCTION)

        def undo(self) -> None:
            code = self._frame.f_code
            with _lock:
                _pending.pop(self._frame, None)
                _uses[id(code)] -= 1
                if not _uses[id(code)]:
                    del _uses[id(code)]
                    sys.monitoring.set_local_events(_claim_tool(), code, _events.NO_EVENTS)

    def _claim_tool() -> int:
        """Returns the number of our monitoring tool.

        CPython's documentation assigns some numbers to others; a number without an owner is preferred.
        """
        global _tool
        if _tool is None:
            free = [number for number in (4, 3, 5, 2, 1, 0) if sys.monitoring.get_tool(number) is None]
            if not free:
                raise RuntimeError("other tools use all of the interpreter's monitoring slots")
            sys.monitoring.use_tool_id(free[0], "interpose")
            sys.monitoring.register_callback(free[0], _events.INSTRUCTION, _instruction)
            _tool = free[0]
        return _tool

    def _instruction(code: CodeType, offset: int) -> Any:
        if code.co_code[offset] in _UNGUARDED:
            return
        signal = _pending.pop(sys._getframe(1), None)
        if signal is not None:
            raise signal
