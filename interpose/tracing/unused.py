"""What was made for a `with` and never used: a statement that would do nothing is refused, anything else is warned about."""

from __future__ import annotations

import linecache
import sys
import warnings
import weakref
from dataclasses import dataclass

from interpose.capture.statement import is_dropped
from interpose.contract.errors import InterposeWarning
from interpose.v1.trace_pb2 import Frame


@dataclass(frozen=True)
class Written:
    """Where something was written in the user's code.

    Attributes:
        filename, line: the place.
        statement: whether it is a statement of its own, whose value nobody has.
    """

    filename: str
    line: int
    statement: bool

    def frame(self) -> Frame:
        """Return the line as a traceback shows it."""
        text = linecache.getline(self.filename, self.line).rstrip("\n")
        return Frame(filename=self.filename, line=self.line, text=text)


def here(depth: int) -> Written:
    """Return where a function was called: of the one that calls this for 1, of its caller for 2, and so on."""
    frame = sys._getframe(depth + 1)
    return Written(frame.f_code.co_filename, frame.f_lineno, is_dropped(frame))


class Unused:
    """Watches an object until it is used; warns, at the line that made it, when it goes without.

    Args:
        watched: the object.
        message: the warning.
        written: where it was made.
    """

    def __init__(self, watched: object, message: str, written: Written) -> None:
        self.written = written
        self._finalizer = weakref.finalize(watched, _warn, message, written)

    def used(self) -> None:
        """The object was used. Idempotent."""
        self._finalizer.detach()


def _warn(message: str, written: Written) -> None:
    warnings.warn_explicit(message, InterposeWarning, written.filename, written.line)
