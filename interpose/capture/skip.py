"""A ``with`` block whose body does not run: its source is read and handed on.

The first thing a frame does inside of a ``with`` block is to store the result of ``__enter__``, or to drop it. An
exception is raised there, before the body's first instruction. That instruction is guarded by this very block and nothing
else, so the exception goes to its ``__exit__`` and no ``try`` of the body's can see it. The target after ``as`` is then
assigned by hand.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from interpose.capture.block import Block, build_block
from interpose.capture.errors import CaptureError
from interpose.capture.fileless import why_unknown
from interpose.capture.interrupt import interrupt
from interpose.capture.recent import Recent
from interpose.capture.scope import Scope
from interpose.capture.source import Source, With, entry_offset, find_with, load
from interpose.capture.verify import same_extent, same_statements

_blocks: Recent[Block] = Recent(1024)  # by code object and offset: a block found once stays what the code was made from
_origins: Recent[Source] = Recent(1024)  # the sources of code objects that were compiled here


class _Skip(BaseException):
    """Carries control from a block's first instruction to its end."""


class CapturedContext:
    """A context manager whose block is captured instead of run. Subclasses override `run_block`."""

    _skipping: _Skipping | None = None

    def __enter__(self) -> Any:
        """Finds the block being entered and arranges that its body does not run.

        Raises CaptureError if the source cannot be found, is not what the running code was compiled from, or holds what
        a block cannot.
        """
        frame = sys._getframe(1)
        while _enters(frame, self) and frame.f_back is not None:
            frame = frame.f_back
        self._skipping = _skip(frame, captured_block(frame))
        return self

    def __exit__(
        self, kind: Any, error: Any, traceback: Any
    ) -> Any:  # not bool: the names of the block are always bound
        """Hands the block to `run_block`, whose exceptions go on as if the block had raised them."""
        skip = self._left(error)
        if skip is None:
            return False
        try:
            self.run_block(skip.block, self._scope(skip))
        except BaseException as raised:
            _forget(raised, skip.signal)
            raise
        finally:
            del skip, error, traceback  # they refer to the frame, which refers to this object
        return True

    def run_block(self, block: Block, scope: Scope) -> None:
        """Called when the block has been skipped, with the names of the caller."""

    def __aenter__(self) -> Any:
        """Finds the block of an ``async with``.

        When the result is awaited, the block's body does not run.
        """
        frame = sys._getframe(1)
        while _enters(frame, self) and frame.f_back is not None:
            frame = frame.f_back
        return _Entering(self, frame, captured_block(frame))

    def __aexit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        """Hands the block to `run_block_async`; returns what is to be awaited."""
        # What traced the thread must be back before anything else runs on its event loop.
        return self._leave_async(self._left(error))

    async def _leave_async(self, skip: _Skipping | None) -> Any:
        if skip is None:
            return False
        try:
            await self.run_block_async(skip.block, self._scope(skip))
        except BaseException as raised:
            _forget(raised, skip.signal)
            raise
        finally:
            del skip
        return True

    async def run_block_async(self, block: Block, scope: Scope) -> None:
        """Called when the block of an ``async with`` has been skipped, with the names of the caller."""

    def _left(self, error: BaseException | None) -> _Skipping | None:
        """Returns what was skipped if `error` says that it was, with the tracing put back as it was."""
        skip, self._skipping = self._skipping, None
        if skip is None:
            return None
        skip.undo()
        if error is None:
            raise _error(
                skip.block, skip.frame, "the block ran here, as it was entered inside a debugger's trace function"
            )
        return skip if error is skip.signal else None

    def _scope(self, skip: _Skipping) -> Scope:
        scope = Scope(skip.frame)
        if skip.block.target is not None:
            scope.assign({skip.block.target: self})
        return scope


class _Entering:
    """The awaitable with which an ``async with`` enters its block.

    The frame is interrupted where it goes on after that.
    """

    def __init__(self, context: CapturedContext, frame: FrameType, block: Block):
        self._context = context
        self._frame: FrameType | None = frame
        self._block = block

    def __await__(self) -> Generator[Any, None, Any]:
        frame, self._frame = self._frame, None
        if frame is not None:
            self._context._skipping = _skip(frame, self._block)
        return self._context
        yield


@dataclass(frozen=True)
class _Skipping:
    """One block between being entered and being left."""

    frame: FrameType
    block: Block
    signal: BaseException
    undo: Callable[[], None]


def _skip(frame: FrameType, block: Block) -> _Skipping:
    signal = _Skip()
    try:
        return _Skipping(frame, block, signal, interrupt(frame, signal))
    except RuntimeError as error:
        raise _error(block, frame, f"the block cannot be skipped: {error}") from None


def _error(block: Block, frame: FrameType, message: str) -> CaptureError:
    return block.origin.error(message, frame.f_lineno, "Run the block as part of a script or a cell.")


def captured_block(frame: FrameType) -> Block:
    """Returns the block that `frame` is entering. Raises CaptureError."""
    code = frame.f_code
    block = _blocks.get(code, frame.f_lasti)
    if block is not None:
        return block
    offset = entry_offset(frame)
    if offset is None:
        raise CaptureError(
            "the block has no source of its own: it is not entered by a `with` statement",
            filename=code.co_filename,
            line=frame.f_lineno,
            hint="Write `with ... as tracer:` and put the code into its body.",
        )
    source = _origins.get(code)
    if source is not None:
        found = find_with(source, code, offset, frame.f_lineno)
    else:
        source = _load(frame)
        found = _verified(source, frame, offset)
        if found is None:  # the text may be older than the code: a module that was edited and loaded again
            linecache.checkcache(code.co_filename)
            source = _load(frame)
            found = _verified(source, frame, offset)
    if found is None:
        raise source.error(
            "the source has changed since this code was loaded",
            frame.f_lineno,
            "Load it again: restart the script, reload the module, or run the cell again.",
        )
    return _blocks.put(code, build_block(source, *found, code), frame.f_lasti)


def _verified(source: Source, frame: FrameType, offset: int) -> tuple[With, int] | None:
    found = find_with(source, frame.f_code, offset, frame.f_lineno)
    if found is None or not same_extent(frame.f_code, offset, found[0]):
        return None
    return found if same_statements(frame.f_code, found[0].body) else None


def known_source(code: Any, source: Source) -> None:
    """Notes that `code` was compiled from `source`, with changes that keep the positions.

    Its blocks then need no comparison.
    """
    _origins.put(code, source)


def _load(frame: FrameType) -> Source:
    code = frame.f_code
    try:
        source = load(code.co_filename, frame.f_globals, code)
    except SyntaxError:
        source = None
    if source is None:
        message, hint = why_unknown(code.co_filename)
        raise CaptureError(message, filename=code.co_filename, line=frame.f_lineno, hint=hint)
    return source


def _enters(frame: FrameType, context: CapturedContext) -> bool:
    """Returns whether a frame is a subclass's `__enter__` that called the class above it.

    `__aenter__` counts too.
    """
    code = frame.f_code
    first = code.co_varnames[:1]
    return code.co_name in ("__enter__", "__aenter__") and bool(first) and frame.f_locals.get(first[0]) is context


def _forget(error: BaseException, signal: BaseException) -> None:
    """Takes the private signal out of what an exception says it happened during."""
    seen: set[int] = set()
    while error.__context__ is not None and id(error) not in seen:
        seen.add(id(error))
        if error.__context__ is signal:
            error.__context__ = signal.__context__  # of a handler around the block
            return
        error = error.__context__
