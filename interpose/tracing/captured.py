"""A `with` block that is captured instead of run; what cannot be captured is refused with the library's own error."""

from __future__ import annotations

from typing import Any, TypeVar

from interpose import capture
from interpose.contract.errors import InvalidArgument
from interpose.program.check import refused
from interpose.tracing.unused import Unused, Written, here

C = TypeVar("C", bound="CapturedBlock")


class CapturedBlock(capture.CapturedContext):
    """A captured block whose syntax errors are the library's own."""

    _unused: Unused | None = None
    _remedy = ""

    def watched(self: C, remedy: str) -> C:
        """Note where it was made; without a `with` it does nothing, and says so with `remedy`.

        Called by the function that the user's code calls.

        Raises:
            InvalidArgument: it is a statement of its own.
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
        """It is a statement of its own: nobody will enter it."""
        assert self._unused is not None
        raise InvalidArgument(f"this does nothing: {self._remedy}", frames=[self._unused.written.frame()])

    @property
    def unused(self) -> bool:
        """Whether it has not been entered."""
        return self._unused is not None

    def used(self) -> Written | None:
        """Note that it is entered, or run; return where it was made."""
        unused, self._unused = self._unused, None
        if unused is None:
            return None
        unused.used()
        return unused.written

    def __repr__(self) -> str:
        return f"<not entered: {self._remedy}>" if self.unused else super().__repr__()

    def __enter__(self) -> Any:
        self.used()
        try:
            return super().__enter__()
        except capture.CaptureError as error:
            raise refused(error) from None

    def __aenter__(self) -> Any:
        self.used()
        try:
            return super().__aenter__()
        except capture.CaptureError as error:
            raise refused(error) from None
