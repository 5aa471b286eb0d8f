"""Finds out on shapes whether each row of a change depends on its row of the prompt alone.

A prompt that is longer than a step is computed in chunks, and a block's change of a chunk is needed when the chunk is computed.
So a change may use no row of a later chunk. `RowWise` sees torch's operations while a block is followed on tensors without
elements. It knows for each tensor which rows of the prompt its elements come from:

- no note: the elements come from no value of the model;
- a note: row i of the tensor comes from row i of the prompt, or of one part of the prompt that the note names;
- in a mixed storage: anything else.

What is not known to keep rows apart mixes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from interpose.v1 import trace_pb2 as pb

# Operations that give other shapes of the same elements, or one result for each row, if the first dimension stays as it is.
_VIEWS = frozenset("view _unsafe_view reshape expand unsqueeze squeeze alias detach clone _to_copy contiguous".split())
_ALONG = frozenset(
    "slice select split split_with_sizes unbind sum mean amax amin prod linalg_vector_norm norm var std argmax argmin "
    "softmax _softmax log_softmax _log_softmax cumsum topk sort index_select narrow max min any all logsumexp".split()
)
_OF_SHAPES = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full".split()
)
_PRODUCTS = frozenset(("mm", "mv"))


@dataclass(frozen=True)
class Note:
    """Which rows of the prompt a tensor comes from.

    Attributes:
        part: () for all rows in their order; a slice of them as (start, stop, step); or one row as (index,).
    """

    part: tuple[int, ...] = ()

    @property
    def single(self) -> bool:
        """Whether the tensor comes from one row, so that its first dimension does not count rows."""
        return len(self.part) == 1


class RowWise(TorchDispatchMode):
    """Follows the rows of a prompt through torch's operations.

    Args:
        where: returns the lines of the block that run.

    Attributes:
        mixed_by: the first operation that mixed rows, by the storage of its result.
        lines: the lines of the block that did, likewise.
    """

    def __init__(self, where: Callable[[], Sequence[pb.Frame]] = tuple) -> None:
        super().__init__()
        self.mixed_by: dict[int, str] = {}
        self.lines: dict[int, Sequence[pb.Frame]] = {}
        self.where = where
        self._notes = WeakTensorKeyDictionary()
        self._storages: list[Any] = []  # kept, so that no other storage gets the number of a mixed storage

    def note(self, tensor: torch.Tensor) -> None:  # [tokens, ...]
        """Note that a tensor is a value of the model, with one row for each token of the prompt."""
        self._notes[tensor] = Note()

    def mix(self, tensor: torch.Tensor, by: str, lines: Sequence[pb.Frame] | None = None) -> None:  # any shape
        """Note that a tensor comes from any rows."""
        storage = _storage(tensor)
        if storage not in self.mixed_by:
            self.mixed_by[storage] = by
            self.lines[storage] = self.where() if lines is None else lines
            self._storages.append(tensor.untyped_storage())

    def lines_of(self, tensor: torch.Tensor) -> Sequence[pb.Frame]:  # any shape
        """Return the lines of the block that mixed the rows of a tensor."""
        return self.lines.get(_storage(tensor), ())

    def why_mixed(self, tensor: torch.Tensor) -> str:  # any shape
        """Return the operation that mixed the rows of a tensor; "" if none did."""
        mixed = self.mixed_by.get(_storage(tensor), "")
        note = self._notes.get(tensor)
        return mixed or ("" if note is None or note == Note() else "a part of the rows")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        result = func(*args, **kwargs)
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        known = [one for one in given if self._notes.get(one) is not None or _storage(one) in self.mixed_by]
        if known and func._schema.name.removeprefix("aten::") not in _OF_SHAPES:
            self._follow(func, args, given, known, made)
        return result

    def _follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        given: list[torch.Tensor],
        known: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> None:  # any shapes
        name = func._schema.name.removeprefix("aten::")
        if any(_storage(one) in self.mixed_by for one in known):
            mixed = next(_storage(one) for one in known if _storage(one) in self.mixed_by)
            self._mix(func, given, made, self.mixed_by[mixed], self.lines[mixed])
            return
        notes = {self._notes[one] for one in known}
        note = self._kept(func, name, args, given, known, made) if len(notes) == 1 else None
        if note is None:
            self._mix(func, given, made, name.rstrip("_"))
            return
        for target in _changed(func, args):
            if self._notes.get(target) != note:  # rows go to where none, or others, are known to be
                self._mix(func, given, made, name.rstrip("_"))
                return
        for one in made:
            self._notes[one] = note

    def _kept(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        given: list[torch.Tensor],
        known: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> Note | None:  # any shapes
        """Return which rows the results come from; None if rows are mixed, or may be."""
        note: Note = self._notes[known[0]]
        if note.single:
            return note
        rows = known[0].shape[0] if known[0].dim() else 0
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if torch.Tag.pointwise in func.tags or name in (
            "where",
            "masked_fill",
            "masked_fill_",
            "copy_",
            "fill_",
            "zero_",
        ):
            dims = max((one.dim() for one in made), default=0)
            alike = all(one.dim() == dims and one.shape[0] == rows for one in (*known, *made))
            return note if dims and alike else None
        same = bool(rows) and all(one.dim() and one.shape[0] == rows for one in made)
        if name == "expand" and made[0].dim() != known[0].dim():
            return None
        if name in _VIEWS:
            return note if same and not (name in ("unsqueeze", "squeeze") and _dim(func, args, first) == 0) else None
        if name in ("slice", "select") and first is not None and _dim(func, args, first) == 0:
            return self._part(name, note, args, first)
        if name in _ALONG:
            return (
                note if same and first is known[0] and len(known) == 1 and 0 not in _dims(func, args, first) else None
            )
        if name in ("transpose", "permute"):
            return note if same and first is not None and _stays(name, args, first.dim()) else None
        if name in ("cat", "stack"):
            dim = args[1] if len(args) > 1 else 0
            parts = args[0]
            return note if same and dim % max(one.dim() for one in made) != 0 and len(parts) else None
        if name in _PRODUCTS:
            return note if same and len(known) == 1 and first is known[0] else None
        if name == "addmm":
            return note if same and len(known) == 1 and args[1] is known[0] else None
        if name == "index_put_":
            values = [args[2], *(one for one in args[1] if one is not None)]
            return note if first is known[0] and len(known) == 1 and all(one is not first for one in values) else None
        return None

    @staticmethod
    def _part(name: str, note: Note, args: tuple[Any, ...], first: torch.Tensor) -> Note | None:  # [rows, ...]
        rows = first.shape[0]
        if name == "select":
            return Note((args[2] % rows,)) if note == Note() else None
        cut = [*args[2:5], None, None, None]
        start, stop, step = slice(*cut[:3]).indices(rows)
        if (start, stop, step) == (0, rows, 1):
            return note
        return Note((start, stop, step)) if note == Note() else None

    def _mix(
        self,
        func: Any,
        given: Iterable[torch.Tensor],
        made: Iterable[torch.Tensor],
        by: str,
        lines: Sequence[pb.Frame] | None = None,
    ) -> None:  # any shapes
        """Note that results, and what an operation may change in place, come from any rows."""
        schema = func._schema
        touched = list(made)
        if schema.is_mutable:
            touched += given
        for one in touched:
            self.mix(one, by, lines)


def _storage(tensor: torch.Tensor) -> int:  # any shape
    return int(tensor.untyped_storage()._cdata)


def _changed(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:  # any shapes
    """Return the tensors that an operation changes in place."""
    arguments = func._schema.arguments
    return [
        arg
        for arg, about in zip(args, arguments, strict=False)
        if about.alias_info is not None and about.alias_info.is_write and isinstance(arg, torch.Tensor)
    ]


def _named(func: Any, args: tuple[Any, ...], name: str, missing: Any) -> Any:
    for at, about in enumerate(func._schema.arguments):
        if about.name == name:
            return args[at] if at < len(args) else about.default_value if about.has_default_value() else missing
    return missing


def _dim(func: Any, args: tuple[Any, ...], first: torch.Tensor | None) -> int:  # any shape
    """Return the dimension that an operation is about; 0 if that is not known."""
    dim = _named(func, args, "dim", 0)
    if first is None or not isinstance(dim, int):
        return 0
    dims = first.dim() + (func._schema.name == "aten::unsqueeze")
    return dim % max(dims, 1)


def _dims(func: Any, args: tuple[Any, ...], first: torch.Tensor) -> list[int]:  # any shape
    """Return the dimensions that an operation goes over; all of them where it does not say."""
    dims = _named(func, args, "dim", None)
    if dims is None or dims == []:
        return list(range(max(first.dim(), 1)))
    return [one % max(first.dim(), 1) for one in ([dims] if isinstance(dims, int) else dims)]


def _stays(name: str, args: tuple[Any, ...], dims: int) -> bool:
    """Return whether the first dimension stays the first."""
    if name == "transpose":
        return all(one % dims != 0 for one in args[1:3])
    return bool(args[1][0] % dims == 0)
