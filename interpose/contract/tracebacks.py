"""Tracebacks that end at the notebook's own line: frames of this library are left out.

`interpose.full_tracebacks()` shows all frames again. An error whose origin is a mistake of this library always has all frames.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import TypeVar

_PACKAGE = __name__.partition(".")[0]
_CALLED = {"grpc", "google", "ml_dtypes", "tqdm"}  # packages whose frames this library's calls bring

E = TypeVar("E", bound=BaseException)


class _Switch:
    full = False


def full_tracebacks(on: bool = True) -> None:
    """Show the frames of this library in tracebacks, or leave them out again with `False`."""
    _Switch.full = on


def are_full() -> bool:
    """Whether tracebacks show the frames of this library."""
    return _Switch.full


def cut(error: E) -> E:
    """Take the frames of this library out of an error's traceback; return the error.

    The tracebacks of its causes and contexts are cut too. A traceback stays as it is if its error is a mistake of this
    library.
    """
    if not _Switch.full:
        for one in _chain(error):
            kept, own = _kept(one.__traceback__)
            if isinstance(one, KeyboardInterrupt) or getattr(type(one), "shown_short", False) or not own:
                one.__traceback__ = _joined(kept)
            context = one.__context__
            if context is not None and one.__cause__ is None and _only_own(context):
                one.__suppress_context__ = True
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [one.__cause__, one.__context__]


def _kept(traceback: TracebackType | None) -> tuple[list[TracebackType], bool]:
    """Return the entries of a traceback to keep, and whether the last entry was left out."""
    kept: list[TracebackType] = []
    inside = False
    while traceback is not None:
        root = str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        inside = root == _PACKAGE or (inside and (root in _CALLED or root in sys.stdlib_module_names))
        if not inside:
            kept.append(traceback)
        traceback = traceback.tb_next
    return kept, inside


def _joined(entries: list[TracebackType]) -> TracebackType | None:
    following: TracebackType | None = None
    for entry in reversed(entries):
        following = TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return following


def _only_own(error: BaseException) -> bool:
    """Whether an error was raised and caught inside this library."""
    return error.__traceback__ is not None and not _kept(error.__traceback__)[0]


class Raising:
    """The value of an `__exit__` that raises an error when the `with` asks for its truth.

    Nothing but the frame of the `with` statement is then in the error's traceback. An `__exit__` that raises adds its own frame.

    Args:
        error: the error.
    """

    __slots__ = ("__bool__",)  # each object has a `__bool__` of its own, of C: a function of Python would be a frame

    def __init__(self, error: BaseException) -> None:
        ended: Generator[None, None, None] = (None for _ in ())
        next(ended, None)  # what is thrown into a generator that has ended comes out without a frame
        self.__bool__ = functools.partial(ended.throw, error)
