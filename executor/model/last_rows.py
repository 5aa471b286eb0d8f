"""A value over a whole prompt of which a block may use the last rows alone.

The rows before may be in the engine's prefix cache, so that no step computes them. It was shown of the block's text that it
asks for none of them (`executor.plan.tails`). An access to one after all is an error, whether or not the row was computed: what
a block gets must not depend on what the cache has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from executor.core.errors import Refusal
from executor.model.items import Opaque
from interpose.v1 import trace_pb2 as pb


class LastRows:
    """Stands for a tensor with a row for each token of a prompt, [tokens, ...].

    It is indexed with whole numbers and slices, from which the last rows come as views.

    Args:
        rows: the rows of the prompt that are there, up to the last, [rows, ...].
        tokens: the length of the prompt.
        last: how many of the last rows may be used.
        location: what errors call the value.
        sized: whether the length is known; otherwise `tokens` is less, by rows that do not matter, and the shape is refused.
    """

    __slots__ = ("_last", "_location", "_rows", "_sized", "_tokens")

    def __init__(
        self, rows: torch.Tensor, tokens: int, last: int, location: str, sized: bool = True
    ) -> None:  # rows: [rows, ...]
        if not last <= rows.shape[0] <= tokens:
            message = (
                f"{location} has {rows.shape[0]} rows in the step, and the block may use the last {last} of {tokens}"
            )
            raise Refusal(pb.ERROR_CODE_ENGINE, message, location=location)
        self._rows = rows
        self._tokens = tokens
        self._last = last
        self._location = location
        self._sized = sized

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole value."""
        if not self._sized:
            self._refuse()
        return torch.Size((self._tokens, *self._rows.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the value."""
        return self._rows.dtype

    @property
    def device(self) -> torch.device:
        """The device of the value."""
        return self._rows.device

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<the last {self._last} rows of {self._location}>"

    def __getitem__(self, key: Any) -> torch.Tensor:  # [...]
        return self._rows[self._within(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._rows[self._within(key)] = value

    def _within(self, key: Any) -> Any:
        """Return an index into the whole value as an index into the rows that are there."""
        first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, None)
        tokens, before = self._tokens, self._tokens - self._rows.shape[0]
        if type(first) is int:
            row = first + tokens if first < 0 else first
            if not 0 <= row < tokens:
                raise IndexError(f"index {first} is out of bounds for dimension 0 with size {tokens}")
            least, within = row, row - before
        elif isinstance(first, slice) and all(one is None or type(one) is int for one in _bounds(first)):
            start, stop, step = first.indices(tokens)
            if step < 1:
                raise ValueError("slice step must be positive")
            least, within = start, slice(start - before, max(start, stop) - before, step)
        else:
            self._refuse()
        if least < tokens - self._last:
            self._refuse()
        if not before:  # an index from the end stays one
            return key
        return within if rest is None else (within, *rest)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused(self._location, self._last)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = next((one for one in tree_leaves((args, kwargs)) if isinstance(one, cls)), None)
        raise refused(
            "a value of the prompt" if found is None else found._location, 0 if found is None else found._last
        )

    __iter__: Callable[..., Any] = _refuse
    __bool__: Callable[..., Any] = _refuse
    __array__ = __float__ = __int__ = __neg__ = __abs__ = __reduce_ex__ = _refuse
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = _refuse
    __mul__ = __rmul__ = __imul__ = __truediv__ = __rtruediv__ = __itruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __mod__ = __floordiv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


class LastItems(tuple):
    """A tuple or list of the model's values, with `LastRows` in it; read only."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        found = next((one for one in self if isinstance(one, LastRows)), None)
        raise refused(
            "a value of the prompt" if found is None else found._location, 0 if found is None else found._last
        )


def last_of(value: Any, tokens: int, last: int, location: str, sized: bool = True) -> Any:
    """Return a value of the model of which the last rows may be used.

    Args:
        value: a tensor, [rows, ...]; a tuple or list of tensors; or anything else, which has no rows.
        tokens, last, location, sized: as of `LastRows`.
    """
    if isinstance(value, torch.Tensor):
        return LastRows(value, tokens, last, location, sized)
    if isinstance(value, tuple | list):
        return LastItems(last_of(item, tokens, last, location, sized) for item in value)
    if value is None or isinstance(value, Opaque):
        return value
    raise refused(location, last)


def _bounds(key: slice) -> tuple[Any, Any, Any]:
    return key.start, key.stop, key.step


def refused(location: str, last: int) -> Refusal:
    """Return why a block is not given rows of its prompt that the prefix cache may have had.

    Args:
        location: what the block asked for.
        last: how many of the prompt's last rows the block may use.
    """
    asks = f"the last {last} rows" if last > 1 else "the last row" if last else "nothing"
    return Refusal(
        pb.ERROR_CODE_INVALID_ARGUMENT,
        f"{location} was asked for in the step of the prompt, although by its text the block asks for {asks} there, so that "
        "part of the prompt may have come from the prefix cache; ask for the value in a statement at the top of the block, "
        "before anything else, and the whole prompt is computed",
        location=location,
    )
