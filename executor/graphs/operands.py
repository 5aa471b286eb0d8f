"""The constants of a plan in the tables, which torch computes when a request joins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from executor.graphs.operations import Refused, Tap
from executor.model.bits import same_bits

_ATEN = torch.ops.aten
# What fills a tensor like another one, with the number; None: the last argument.
_FILLED = {
    _ATEN.zeros_like.default: 0,
    _ATEN.ones_like.default: 1,
    _ATEN.full_like.default: None,
    _ATEN.new_zeros.default: 0,
    _ATEN.new_ones.default: 1,
    _ATEN.new_full.default: None,
}


@dataclass(frozen=True)
class Constant:
    """A node that depends on no location.

    Attributes:
        node: the node, or the input of the program.
    """

    node: fx.Node

    @property
    def like(self) -> torch.Tensor:  # any shape
        """A tensor without elements, of the shape and dtype of the constant."""
        found: torch.Tensor = self.node.meta["val"]
        return found


@dataclass(frozen=True)
class Spread:
    """Numbers for some columns among others, which an operation leaves as they are, bit for bit.

    Attributes:
        width: the number of columns.
        picks: the columns that have a number of their own.
        rest: what the other columns get: 1 to multiply by, -0.0 to add.
    """

    width: int
    picks: tuple[int, ...]
    rest: float

    def of(self, numbers: torch.Tensor) -> torch.Tensor:  # [picks] -> [width]
        """Return a number for each column."""
        made = torch.full((self.width,), self.rest, dtype=numbers.dtype, device=numbers.device)
        made[list(self.picks)] = numbers
        return made


@dataclass(frozen=True)
class Operand:
    """What an operation of the tables takes from a constant.

    Attributes:
        node: the constant.
        shape: the shape of the block's tensor beside it.
        flat: whether that shape has no dimension of rows.
        dtype: in which the operation takes it.
        negated: whether it is subtracted.
        part: the numbers that the operation takes, the first and the one after the last; None: all.
        into: for an operation on columns that are not side by side, how it spreads over all of them; None: they are.
        start: the request's row that the first of its rows is beside.
        lines: the rows of the shape that the operation takes, the first and the one after the last; None: all.
    """

    node: fx.Node
    shape: tuple[int, ...]
    flat: bool
    dtype: torch.dtype
    negated: bool = False
    part: tuple[int, int] | None = None
    into: Spread | None = None
    start: int = 0
    lines: tuple[int, int] | None = None

    def of(self, value: torch.Tensor) -> dict[str, Any]:  # any shape that spreads to `shape`
        """Return the tap's vector or number, and its rows where each has a vector of its own.

        Raises:
            Refused: the rows get several vectors in columns that are not side by side.
        """
        if value.requires_grad:
            raise Refused("a constant has gradients")
        if value.dim() == 0 and self.into is None:
            return {"number": -float(value) if self.negated else float(value)}
        spread = value.detach().to(self.dtype).broadcast_to(self.shape)
        several = not self.flat and self.shape[0] > 1 and value.dim() == len(self.shape) and value.shape[0] > 1
        if not self.flat:
            spread = spread[slice(*(self.lines or (0, self.shape[0])))]
            several = several and len(spread) > 1 and not all(same_bits(row, spread[0]) for row in spread)
            spread = spread if several else spread[0]
        vector = spread.reshape(len(spread), -1) if several else spread.reshape(-1)
        if self.part is not None:
            vector = vector[..., slice(*self.part)]
        vector = -vector if self.negated else vector.clone(memory_format=torch.contiguous_format)
        if not several:
            return {"vector": vector if self.into is None else self.into.of(vector)}
        if self.into is not None:
            raise Refused("the rows of a request get several vectors in columns that are not side by side")
        return {"vector": vector, "rows": (self.start, self.start + len(vector))}


@dataclass(frozen=True, eq=False)
class Sketch:
    """An operation of the tables before its constants are known.

    Attributes:
        tap: the operation, at no site.
        operand: what it takes from a constant, if it does.
    """

    tap: Tap
    operand: Operand | None = None


def runs_of(picks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the parts of a list of columns in which they stand side by side."""
    starts = [0, *(i for i in range(1, len(picks)) if picks[i] != picks[i - 1] + 1)]
    return list(zip(starts, [*starts[1:], len(picks)], strict=True))


def values_of(nodes: Sequence[fx.Node], given: Mapping[fx.Node, torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """Return the values of constants.

    Args:
        nodes: the constants, in the order of the program.
        given: the inputs of the program, any shape.
    """
    found = dict(given)
    with torch.inference_mode(False), torch.no_grad():
        for node in nodes:
            number = filling(node)
            if number is not None:
                like = node.meta["val"]
                found[node] = torch.full(like.shape, number, dtype=like.dtype, device=like.device)
            else:
                named = fx.node.map_arg(node.kwargs, found.__getitem__)
                found[node] = node.target(*fx.node.map_arg(node.args, found.__getitem__), **named)
    return found


def filling(node: fx.Node) -> float | None:
    """Return the number with which a node fills a tensor like another one; None if it does not."""
    if node.target not in _FILLED:
        return None
    number = _FILLED[node.target]
    number = node.args[-1] if number is None else number
    return number if isinstance(number, int | float) else None
