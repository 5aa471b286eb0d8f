"""Warnings about objects that were made for a `with` and never used.

A call that is a statement of its own is refused, because it would do nothing.
"""

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
    """A place in the user's code.

    Attributes:
        filename, line: the place.
        statement: whether the call is a statement of its own, whose value is thrown away.
    """

    filename: str
    line: int
    statement: bool

    def frame(self) -> Frame:
        """Return the line as a frame of a traceback."""
        text = linecache.getline(self.filename, self.line).rstrip("\n")
        return Frame(filename=self.filename, line=self.line, text=text)


def here(depth: int) -> Written:
    """Return the line that called a function: for 1 the caller of `here`, for 2 its caller."""
    frame = sys._getframe(depth + 1)
    return Written(frame.f_code.co_filename, frame.f_lineno, is_dropped(frame))


class Unused:
    """Warns when an object is collected that was never used.

    Args:
        watched: the object.
        message: the text of the warning.
        written: the line that made the object; the warning names this line.
    """

    def __init__(self, watched: object, message: str, written: Written) -> None:
        self.written = written
        self._finalizer = weakref.finalize(watched, _warn, message, written)

    def used(self) -> None:
        """Note that the object was used. Idempotent."""
        self._finalizer.detach()


def _warn(message: str, written: Written) -> None:
    warnings.warn_explicit(message, InterposeWarning, written.filename, written.line)
