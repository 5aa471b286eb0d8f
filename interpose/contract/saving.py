"""The function `interpose.save`, which keeps a value past its block.

The code that runs a block sets the meaning of a save with `saving_with`. The client does so for the outer block of a trace,
and the worker does so for the blocks in the model.
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
    """Keep a value of any type past the block, and return the value.

    `value.save()` does the same.

    Raises:
        InvalidArgument: no block is running.
    """
    keeper = _keeper.get()
    if keeper is None:
        raise InvalidArgument("interpose.save(x) keeps a value of a trace: use it inside `with model.trace(...)`")
    return keeper(value)


def call_save(value: Any, keeper: Callable[[Any], Any]) -> Any:
    """Run `value.save()`: keep the value, or call the `save` of its own class.

    Only a method `save` written in Python counts as the class's own.
    """
    own = isinstance(getattr(type(value), "save", None), FunctionType)
    return value.save() if own else keeper(value)


@contextmanager
def saving_with(keeper: Callable[[Any], Any]) -> Iterator[None]:
    """Make `interpose.save` call `keeper` in this context."""
    token = _keeper.set(keeper)
    try:
        yield
    finally:
        _keeper.reset(token)
