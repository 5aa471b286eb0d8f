"""A `with` block that is captured instead of run, with the library's own errors."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from interpose import capture
from interpose.contract.errors import InvalidArgument
from interpose.contract.tracebacks import Raising, are_full, cut
from interpose.program.check import refused
from interpose.tracing.unused import Unused, Written, here

C = TypeVar("C", bound="CapturedBlock")


class CapturedBlock(capture.CapturedContext):
    """A captured block that raises InvalidArgument where the block cannot be captured."""

    _unused: Unused | None = None
    _remedy = ""

    def watched(self: C, remedy: str) -> C:
        """Warn with `remedy` if this object never enters a `with`; return the object.

        The caller of this method is the function that the user's code calls.

        Raises:
            InvalidArgument: the user's call is a statement of its own.
        """
        written = here(2)
        self._remedy = remedy
        self._unused = Unused(self, f"this did nothing: {remedy}", written)
        if written.statement:
            try:
                self.dropped()
            except BaseException:
                self.used()
                raise
        return self

    def dropped(self) -> None:
        """Refuse a call that is a statement of its own: no `with` can enter its value."""
        assert self._unused is not None
        raise InvalidArgument(f"this does nothing: {self._remedy}", frames=[self._unused.written.frame()])

    @property
    def unused(self) -> bool:
        """Whether no `with` has entered the block."""
        return self._unused is not None

    def used(self) -> Written | None:
        """Note that the block is entered or run; return the place in the user's code that made it."""
        unused, self._unused = self._unused, None
        if unused is None:
            return None
        unused.used()
        return unused.written

    def __repr__(self) -> str:
        return f"<not entered: {self._remedy}>" if self.unused else super().__repr__()

    def __enter__(self: C) -> C:
        self.used()
        try:
            super().__enter__()
        except capture.CaptureError as error:
            raise refused(error) from None
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        """Send the block; an error appears in the traceback at the line of the `with` statement."""
        try:
            return super().__exit__(kind, error, traceback)
        except BaseException as raised:
            if are_full():
                raise
            return Raising(cut(raised))

    def __aenter__(self: C) -> Awaitable[C]:
        self.used()
        try:
            entering: Awaitable[C] = super().__aenter__()
        except capture.CaptureError as error:
            raise refused(error) from None
        return entering

    async def _leave_async(self, skip: Any) -> Any:
        try:
            return await super()._leave_async(skip)
        except Exception as raised:
            if are_full():
                raise
            return Raising(cut(raised))
