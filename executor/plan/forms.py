"""The form of a location's value: its tuples and lists, and each tensor's shape and dtype.

A plan is traced on the forms of the locations that it reads. The first turns of a block show them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from executor.model.items import Path, kind_of, made_of
from executor.model.rows import SomeRows


@dataclass(frozen=True)
class Leaf:
    """A tensor of a value.

    Attributes:
        index: its number among the tensors of the value; a tensor that stands there twice has one number.
        shape: without the first dimension, which counts rows.
        dtype: of its elements.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Other:
    """A part of a value that is no request's own.

    Attributes:
        what: the name of its type.
    """

    what: str


@dataclass(frozen=True)
class Group:
    """A tuple, a list or a dict.

    Attributes:
        kind: its class.
        items: its parts.
        keys: of a dict.
    """

    kind: type
    items: tuple[Any, ...]
    keys: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Form:
    """The form of a location's value.

    Attributes:
        tree: a `Leaf`, a `Group`, an `Other`, or a plain constant.
        rows: the rows of a request, the first dimension of each tensor that a block gets.
    """

    tree: Any
    rows: int

    @classmethod
    def of(cls, value: Any, rows: SomeRows, whole: Callable[[torch.Tensor, Path], torch.Tensor]) -> Form:
        """Return the form of a model's value.

        Args:
            value: the model's.
            rows: the rows of a request.
            whole: returns a request's rows of a tensor at a path, whole over the ranks: [rows, ...].
        """
        known: list[tuple[torch.Tensor, Leaf]] = []
        count = 0

        def visit(part: Any, path: Path) -> Any:
            nonlocal count
            if isinstance(part, torch.Tensor):
                held = next((leaf for tensor, leaf in known if tensor is part), None)
                if held is not None:
                    return held
                if part.dim() == 0 or not rows.holds(part):
                    return Other("tensor")
                mine = whole(part, path)
                count = mine.shape[0]
                leaf = Leaf(len(known), tuple(mine.shape[1:]), mine.dtype)
                known.append((part, leaf))
                return leaf
            if isinstance(part, tuple | list):
                return Group(kind_of(part), tuple(visit(item, (*path, i)) for i, item in enumerate(part)))
            if isinstance(part, dict):
                return Group(dict, tuple(visit(item, (*path, key)) for key, item in part.items()), tuple(part))
            return part if part is None or isinstance(part, bool | int | float | str) else Other(type(part).__name__)

        return cls(visit(value, ()), count)

    @classmethod
    def of_copies(cls, value: Any) -> Form:
        """Return the form of a block's own copies."""
        return cls.of(value, Own(), lambda tensor, _: tensor)

    def leaves(self) -> Iterator[tuple[Leaf, Path]]:
        """Return the tensors, each at the first path where it stands, by their numbers."""
        seen: set[int] = set()

        def visit(part: Any, path: Path) -> Iterator[tuple[Leaf, Path]]:
            if isinstance(part, Leaf) and part.index not in seen:
                seen.add(part.index)
                yield part, path
            elif isinstance(part, Group):
                for key, item in zip(part.keys or range(len(part.items)), part.items, strict=True):
                    yield from visit(item, (*path, key))

        return visit(self.tree, ())

    def filled(self, tensors: list[torch.Tensor]) -> Any:
        """Return a value of this form."""

        def visit(part: Any) -> Any:
            if isinstance(part, Leaf):
                return tensors[part.index]
            if isinstance(part, Group):
                items = [visit(item) for item in part.items]
                return dict(zip(part.keys, items, strict=True)) if part.kind is dict else made_of(part.kind, items)
            return object() if isinstance(part, Other) else part

        return visit(self.tree)


class Own:
    """The rows of a block's own copies: all of them."""

    def holds(self, tensor: torch.Tensor) -> bool:  # [rows, ...]
        return True

    def of(self, tensor: torch.Tensor) -> torch.Tensor:  # [rows, ...]
        return tensor

    def write(self, tensor: torch.Tensor, mine: torch.Tensor) -> None:  # [rows, ...]
        tensor.copy_(mine)
