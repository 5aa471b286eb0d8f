"""`interpose.save`: keeps a value past its block.

Whoever runs a block says what saving means while it does: the notebook for the outer block of a trace, the worker for
the blocks inside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeVar

from interpose.contract.errors import InvalidArgument

T = TypeVar("T")

_keeper: ContextVar[Callable[[Any], Any] | None] = ContextVar("interpose_keeper", default=None)


def save(value: T) -> T:
    """Keep a value past the block and return it; the same as `value.save()`, for values of any type.

    Raises:
        InvalidArgument: no block is running.
    """
    keeper = _keeper.get()
    if keeper is None:
        raise InvalidArgument("interpose.save(x) keeps a value of a trace: use it inside `with model.trace(...)`")
    return keeper(value)


def call_save(value: Any, keeper: Callable[[Any], Any]) -> Any:
    """Do what `value.save()` says: keep the value, unless its class, written in Python, has a `save` of its own."""
    own = isinstance(getattr(type(value), "save", None), FunctionType)
    return value.save() if own else keeper(value)


@contextmanager
def saving_with(keeper: Callable[[Any], Any]) -> Iterator[None]:
    """Make `save` call `keeper` in this context."""
    token = _keeper.set(keeper)
    try:
        yield
    finally:
        _keeper.reset(token)
