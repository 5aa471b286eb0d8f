"""Follows a plan's program without values, as operations of the tables on columns of sites.

Size: all that a program may do to the columns of a site.

A node that depends on no location is a `Constant`, which torch computes as the block would, when a request joins. A node that the
tables cannot give is `Unknown`; the host may compute it from what taps read (`executor.graphs.tail`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from executor.graphs.operands import Constant, Operand, Sketch, Spread, filling, runs_of
from executor.graphs.operations import ALL, Code, Tap
from executor.plan.ir import Plan

_ATEN = torch.ops.aten
_SAME = (_ATEN.clone.default, _ATEN.alias.default, _ATEN.detach.default, _ATEN.lift_fresh_copy.default)
_SHAPES = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.unsqueeze.default)


@dataclass(frozen=True)
class Cells:
    """Columns of a site after some operations.

    Attributes:
        read: the index of the location.
        leaves: the tensors of the location that the columns are, or are the sum of.
        done: the operations so far.
        columns: the first column and the column after the last.
        parts: the shape of a row: (columns,), (heads, columns of a head), or () for one column.
        flat: whether the dimension of rows is gone, of a single row.
        wide: whether the block has them in float32, where the model has a narrower dtype: 1 as they are, 2 after an operation
            whose result is not rounded yet.
        picks: the columns that the block has, of all in `columns`, counted from the first of these; None: all of them.
        rows: the first row and the row after the last, of a prompt of several rows; None: all of them.
        lines: the rows that the block has, if they are not side by side, or not in their order; then `rows` is None.

    Size: data: how the block's tensor lies in the site's.
    """

    read: int
    leaves: tuple[int, ...]
    done: tuple[Sketch, ...]
    columns: tuple[int, int]
    parts: tuple[int, ...]
    flat: bool = False
    wide: int = 0
    picks: tuple[int, ...] | None = None
    rows: tuple[int, int] | None = None
    lines: tuple[int, ...] | None = None

    @property
    def complete(self) -> bool:
        """Whether these are all rows, and columns that are side by side, in the model's dtype."""
        return not self.wide and self.picks is None and self.rows is None and self.lines is None

    @classmethod
    def of_leaf(cls, read: int, leaf: int, width: int) -> Cells:
        """Return all columns of a tensor as the model gives it."""
        return cls(read, (leaf,), (), (0, width), (width,))

    def then(self, code: Code, operand: Operand | None = None, **numbers: float) -> Cells:
        """Return the columns after one more operation on them."""
        tap = replace(Tap(-1, code, self.columns, self.rows or (0, ALL)), **numbers)  # type: ignore[arg-type]
        if self.lines is None:
            return replace(self, done=(*self.done, Sketch(tap, operand)))
        done = list(self.done)
        for first, after in runs_of(self.lines):
            start = self.lines[first]
            given = operand and replace(operand, lines=(first, after), start=start)
            done.append(Sketch(replace(tap, rows=(start, start + after - first)), given))
        return replace(self, done=tuple(done))

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the block's tensor."""
        return self.parts if self.flat else (self.count(rows), *self.parts)

    def count(self, rows: int) -> int:
        """Return how many of the request's rows the block's tensor has."""
        return len(self.lines) if self.lines is not None else self.rows[1] - self.rows[0] if self.rows else rows


@dataclass(frozen=True)
class Changed:
    """For each row whether two values of a residual pair differ.

    Attributes:
        before, now: the values.
        source: what the program has for the value now: the same, or a constant.
        fits: whether `any` was asked of the columns.
    """

    before: Cells
    now: Cells
    source: Any
    fits: bool = False


@dataclass(frozen=True)
class Half:
    """One tensor of a residual pair into which a change is written."""

    leaf: int
    now: Cells


@dataclass(frozen=True)
class Unknown:
    """What the tables cannot give, with the reason."""

    why: str


@dataclass
class Walk:
    """Follows a program.

    Attributes:
        values: what each node is: `Cells`, `Changed`, `Half`, `Unknown` or `Constant`.
    """

    plan: Plan
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def node(self, node: fx.Node) -> Any:
        """Return what a node gives."""
        inputs = [self.values[one] for one in node.all_input_nodes]
        if all(isinstance(one, Constant) for one in inputs) or filling(node) is not None:
            return Constant(node)
        unknown = next((one for one in inputs if isinstance(one, Unknown)), None)
        if unknown is not None:
            return unknown
        args = [self.values[one] if isinstance(one, fx.Node) else one for one in node.args]
        rest = {key for key in node.kwargs if key != "memory_format"}
        made = self._pair(node.target, args)
        if made is None and isinstance(args[0], Cells) and node.target is _ATEN._to_copy.default:
            made = self._cast(args[0], node)
        elif made is None and isinstance(args[0], Cells) and not rest:
            made = self._moved(node, args) if node.target in _MOVES else self.computed(node.target, args)
        if made is None and len(args) == 2 and isinstance(args[1], Cells) and not rest and node.target in _EITHER:
            made = self.computed(node.target, args[::-1])
        if made is None or (isinstance(made, Cells) and not self._fits(made, node.meta["val"])):
            return Unknown(f"the tables have no {node.target} as the block uses it")
        return made

    def _fits(self, cells: Cells, like: torch.Tensor) -> bool:  # any shape
        """Return whether the columns have the shape and dtype of a node."""
        dtype = torch.float32 if cells.wide else self._dtype(cells)
        return cells.shape(self.plan.rows) == tuple(like.shape) and like.dtype == dtype

    def _dtype(self, cells: Cells) -> torch.dtype:
        leaves = self.plan.reads[cells.read].form.leaves()
        return next(leaf.dtype for leaf, _ in leaves if leaf.index == cells.leaves[0])

    def _cast(self, cells: Cells, node: fx.Node) -> Cells | None:
        """Return the same columns in another dtype."""
        if set(node.kwargs) - {"dtype", "layout", "memory_format", "non_blocking"}:
            return None
        dtype, narrow = node.meta["val"].dtype, self._dtype(cells)
        if dtype == narrow:
            return replace(cells, wide=0)
        return replace(cells, wide=cells.wide or 1) if dtype == torch.float32 and narrow in _NARROW else None

    def _pair(self, target: Any, args: Sequence[Any]) -> Any:
        """Return the result of an operation of a residual pair.

        It is the sum, or the way back (`executor.views.view.Stream`).
        """
        first, second = args[0], args[1] if len(args) > 1 else None
        if any(isinstance(one, Cells) and not one.complete for one in (first, second)):
            return None
        if target is _ATEN.add.Tensor and isinstance(first, Cells) and isinstance(second, Cells):
            raw = not first.done and not second.done and first.columns == second.columns and first.columns[0] == 0
            if raw and first.read == second.read and len(first.leaves) == len(second.leaves) == 1:
                leaves = tuple(sorted({*first.leaves, *second.leaves}))
                same = (first.parts, first.flat) == (second.parts, second.flat) and len(leaves) == 2
                return replace(first, leaves=leaves) if same else None
        if target is _ATEN.ne.Tensor and isinstance(first, Cells) and len(first.leaves) == 2 and not first.done:
            now = self.computed(_ATEN.copy.default, [first, second]) if isinstance(second, Constant) else second
            if isinstance(now, Cells) and (first.read, first.leaves, first.columns) == (
                now.read,
                now.leaves,
                now.columns,
            ):
                return Changed(first, now, second)
        if target is _ATEN.any.dim and isinstance(first, Changed) and list(args[1:]) == [-1, True]:
            return replace(first, fits=True)
        if target is _ATEN.masked_fill.Scalar and isinstance(first, Cells) and isinstance(second, Changed):
            fits = second.fits and args[2] == 0 and _is_half(first, second.now, 0)
            return Half(first.leaves[0], second.now) if fits else None
        if target is _ATEN.where.self and isinstance(first, Changed) and first.fits:
            other = args[2]
            constant = isinstance(second, Constant) and second == first.source
            if not (constant or (isinstance(second, Cells) and second == first.now)):
                return None
            if isinstance(other, Cells) and _is_half(other, first.now, 1):
                return Half(other.leaves[0], first.now)
        return None

    def _moved(self, node: fx.Node, args: Sequence[Any]) -> Cells | None:
        cells, target = args[0], node.target
        if target in _SAME:
            return cells
        if target in _SHAPES:
            return self._shaped(cells, tuple(node.meta["val"].shape))
        if cells.picks is not None or cells.lines is not None:
            return None
        if target in (_ATEN.index.Tensor, _ATEN.index_put.default):
            part = self._lined(cells, args[1]) or self._picked(cells, args[1])
            if part is None or target is _ATEN.index.Tensor:
                return part
            return None if any(args[3:]) else self._scattered(cells, args[2], part)
        scatters = target in (_ATEN.select_scatter.default, _ATEN.slice_scatter.default)
        given = [*args[2 if scatters else 1 :], *[None] * 4]
        dims = len(cells.shape(self.plan.rows))
        dim = (given[0] or 0) % dims
        if target in (_ATEN.select.int, _ATEN.select_scatter.default):
            part = self._selected(cells, dim, given[1])
        else:
            part = self._sliced(cells, dim, given[1] or 0, given[2], given[3] or 1)
        if part is None:
            return None
        return self._scattered(cells, args[1], part) if scatters else part

    def _shaped(self, cells: Cells, shape: tuple[int, ...]) -> Cells | None:
        """Return the same columns with heads apart or not, or with a single row's dimension or not."""
        rows, width = cells.count(self.plan.rows), math.prod(cells.parts)
        if cells.lines is not None:
            return None
        for flat in (cells.flat, not cells.flat):
            if flat != cells.flat and rows != 1:
                continue
            parts = shape if flat else shape[1:]
            if len(parts) <= 2 and math.prod(parts) == width and (flat or shape[0] == rows):
                return replace(cells, parts=parts, flat=flat)
        return None

    def _selected(self, cells: Cells, dim: int, index: int) -> Cells | None:
        if dim == 0 and not cells.flat:
            if self.plan.rows == 1:
                return replace(cells, flat=True) if index in (0, -1) else None
            count, first = cells.count(self.plan.rows), cells.rows[0] if cells.rows else 0
            first += index % count
            return replace(cells, flat=True, rows=(first, first + 1))
        if dim != (not cells.flat):  # a column of each head, which are not side by side
            return None
        size = cells.parts[1] if len(cells.parts) == 2 else 1
        start = cells.columns[0] + index % cells.parts[0] * size
        return replace(cells, columns=(start, start + size), parts=cells.parts[1:])

    def _picked(self, cells: Cells, indices: Sequence[Any]) -> Cells | None:
        """Return the columns of a list in the block's text, None of another list."""
        *before, last = indices
        every = len(cells.parts) == 1 and len(before) == (not cells.flat) and all(one is None for one in before)
        found = self._literal(last) if every and isinstance(last, fx.Node) else None
        if found is None or found.dim() != 1 or found.dtype.is_floating_point or not found.numel():
            return None
        width = cells.parts[0]
        numbers = [int(one) for one in found]
        if len({one % width for one in numbers}) < len(numbers) or not all(-width <= one < width for one in numbers):
            return None
        return replace(cells, parts=(len(numbers),), picks=tuple(one % width for one in numbers))

    def _lined(self, cells: Cells, indices: Sequence[Any]) -> Cells | None:
        """Return the rows of a list in the block's text, None of another list."""
        if cells.flat or self.plan.rows == 1 or len(indices) != 1 or not isinstance(indices[0], fx.Node):
            return None
        found, count = self._literal(indices[0]), cells.count(self.plan.rows)
        if found is None or found.dim() != 1 or found.dtype.is_floating_point or found.dtype == torch.bool:
            return None
        numbers = [int(one) for one in found]
        if not all(-count <= one < count for one in numbers):
            return None
        return self._with_lines(cells, [one % count for one in numbers])

    def _with_lines(self, cells: Cells, numbers: Sequence[int]) -> Cells | None:
        """Return some rows of columns; each may be there once."""
        first = cells.rows[0] if cells.rows else 0
        lines = tuple(first + one for one in numbers)
        if not lines or len(set(lines)) < len(lines) or len(runs_of(lines)) > _MOST_RUNS:
            return None
        return replace(cells, rows=None, lines=lines)

    def _literal(self, node: fx.Node) -> torch.Tensor | None:  # any shape
        """Return the tensor that the block's text made of numbers."""
        while node.target in _SAME and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        if node.op != "placeholder":
            return None
        names = dict(zip(self.plan.functional.inputs, self.plan.inputs, strict=True))
        kind, _, number = names[node].partition("_")
        return self.plan.literals[int(number)] if kind == "literal" else None

    def _sliced(self, cells: Cells, dim: int, begin: int, end: int | None, step: int) -> Cells | None:
        if end is None or step < 1:
            return None
        if dim == 0 and not cells.flat:
            count = cells.count(self.plan.rows)
            begin, end = _bounds(begin, end, count)
            if not begin < end:
                return None
            if (begin, end, step) == (0, count, 1):
                return cells
            if self.plan.rows == 1:
                return None
            if step != 1:
                return self._with_lines(cells, range(begin, end, step))
            first = cells.rows[0] if cells.rows else 0
            return replace(cells, rows=(first + begin, first + end))
        if step != 1:
            picks = tuple(range(begin, min(end, cells.parts[0]), step))
            fits = len(cells.parts) == 1 and dim == (not cells.flat) and begin >= 0 and picks
            return replace(cells, parts=(len(picks),), picks=picks) if fits else None
        if dim != (not cells.flat):  # some columns of each head are not side by side
            return None
        begin, end = _bounds(begin, end, cells.parts[0])
        if not begin < end:
            return None
        unit = cells.parts[1] if len(cells.parts) == 2 else 1
        start = cells.columns[0]
        columns = (start + begin * unit, start + end * unit)
        return replace(cells, columns=columns, parts=(end - begin, *cells.parts[1:]))

    def _scattered(self, cells: Cells, source: Any, part: Cells) -> Cells | None:
        if isinstance(source, Constant):
            source = self.computed(_ATEN.copy.default, [part, source])
        if not isinstance(source, Cells) or (source.read, source.leaves) != (cells.read, cells.leaves):
            return None
        new, (start, stop) = source.done[len(cells.done) :], part.columns
        inside = all(start <= one.tap.columns[0] and one.tap.columns[1] <= stop for one in new)
        if part.lines is not None:
            inside = inside and all(set(part.lines).issuperset(range(*one.tap.rows)) for one in new)
        elif part.rows is not None:
            inside = inside and all(part.rows[0] <= one.tap.rows[0] and one.tap.rows[1] <= part.rows[1] for one in new)
        same = (source.columns, source.parts, source.picks) == (part.columns, part.parts, part.picks)
        same = same and (source.rows, source.lines) == (part.rows, part.lines)
        if self.plan.rows == 1 and part.picks is not None:  # `index_put` takes a value of fewer dimensions
            source = replace(source, flat=part.flat)
        same = same and source.flat == part.flat
        if source.done[: len(cells.done)] != cells.done or not same or not inside or source.wide or cells.wide:
            return None
        return replace(cells, done=source.done)

    def computed(self, target: Any, args: Sequence[Any]) -> Cells | None:
        """Return columns after an operation with a number or a constant, None if there is none."""
        cells: Cells = args[0]
        if target is _ATEN.copy.default and isinstance(args[1], Cells):
            return self._copied(cells, args[1])
        if cells.wide == 2:
            return None
        cells = replace(cells, wide=2 * cells.wide)
        if cells.picks is not None and cells.lines is not None:
            return None
        if cells.picks is not None:
            return self._spread(cells, cells.picks, target, args)
        if target is _ATEN.neg.default:
            return cells.then(Code.MULTIPLY, number=-1.0)
        if target is _ATEN.clamp.default:
            low, high = [*args[1:], None][:2]
            if low == 0 or high == 0:
                return None
            bounds = {"low": low} if low is not None else {}
            return cells.then(Code.CLAMP, **bounds, **({"high": high} if high is not None else {}))
        code = _CODES.get(target)
        if code is None or len(args) != 2:
            return None
        value, negated = args[1], target is _ATEN.sub.Tensor
        if isinstance(value, Constant):
            return self._with_constant(cells, code, value, negated)
        # Beside a float32 tensor a number is used as it is, and beside a narrower tensor a CPU rounds it before it adds it.
        if isinstance(value, bool) or not isinstance(value, int | float) or (cells.wide and code is Code.ADD):
            return None
        return cells.then(code, number=-float(value) if negated else float(value))

    def _spread(self, cells: Cells, picks: tuple[int, ...], target: Any, args: Sequence[Any]) -> Cells | None:
        """Return columns that are not side by side after an operation."""
        code, base = _CODES.get(target), replace(cells, picks=None, parts=(len(picks),))
        if code is None or len(args) != 2 or cells.wide:
            return None
        value, start = args[1], cells.columns[0]
        made: Cells | None
        if code is Code.SET:
            runs, made = runs_of(picks), base
            if len(runs) > _MOST_RUNS:
                return None
            for first, after in runs:
                columns = (start + picks[first], start + picks[after - 1] + 1)
                one = self.computed(target, [replace(base, done=()), value])
                if one is None or one.wide:
                    return None
                [sketch] = one.done
                operand = sketch.operand and replace(sketch.operand, part=(first, after))
                sketch = Sketch(replace(sketch.tap, columns=columns), operand)
                made = replace(made, done=(*made.done, sketch))
            return replace(made, picks=picks)
        spread = Spread(cells.columns[1] - start, picks, 1.0 if code is Code.MULTIPLY else -0.0)
        if isinstance(value, Constant):
            made = self._with_constant(base, code, value, negated=target is _ATEN.sub.Tensor)
            if made is None or made.wide or not value.like.dim():
                return None
            sketch = made.done[-1]
            assert sketch.operand is not None
            sketch = replace(sketch, operand=replace(sketch.operand, into=spread))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = -float(value) if target is _ATEN.sub.Tensor else float(value)
            held = torch.full((len(picks),), number, dtype=self._dtype(cells))
            if float(held[0]) != float(torch.tensor(number, dtype=torch.float32)):  # it would be rounded
                return None
            sketch = Sketch(Tap(-1, code, cells.columns, cells.rows or (0, ALL), vector=spread.of(held)))
        else:
            return None
        return replace(cells, done=(*cells.done, sketch))

    def _with_constant(self, cells: Cells, code: Code, value: Constant, negated: bool) -> Cells | None:
        like, shape, narrow = value.like, cells.shape(self.plan.rows), self._dtype(cells)
        given, dtype = like.dtype, narrow
        if code is Code.SET:
            fits = given.is_floating_point and not cells.wide
        elif not like.dim():
            fits = given == narrow and not cells.wide
        elif given == torch.float32 and narrow in _NARROW:
            # The result is float32, whatever the dtype of the columns.
            fits, dtype, cells = True, torch.float32, replace(cells, wide=2)
        else:
            fits = given == narrow
        spreads = len(like.shape) <= len(shape) and all(
            one in (1, other) for one, other in zip(reversed(like.shape), reversed(shape), strict=False)
        )
        start = cells.rows[0] if cells.rows else 0
        operand = Operand(value.node, shape, cells.flat, dtype, negated, start=start)
        return cells.then(code, operand) if fits and spreads else None

    def _copied(self, cells: Cells, source: Cells) -> Cells | None:
        """Return columns into which the block wrote what it made of them."""
        where = (source.read, source.leaves, source.columns, source.parts, source.flat, source.picks)
        same = where == (cells.read, cells.leaves, cells.columns, cells.parts, cells.flat, cells.picks)
        fits = same and not cells.wide and (source.rows, source.lines) == (cells.rows, cells.lines)
        return replace(source, wide=0) if fits else None


def _is_half(cells: Cells, pair: Cells, which: int) -> bool:
    """Return whether columns are one tensor of a pair, as the model gave it."""
    same = (cells.read, cells.columns, cells.leaves) == (pair.read, pair.columns, pair.leaves[which : which + 1])
    return same and not cells.done and cells.complete


def _bounds(begin: int, end: int, size: int) -> tuple[int, int]:
    """Return the bounds of a slice of so many items, counted from the first."""
    first, after = (min(max(one + size if one < 0 else one, 0), size) for one in (begin, end))
    return first, after


_MOST_RUNS = 32
_NARROW = (torch.bfloat16, torch.float16)
_MOVES = (
    *_SAME,
    *_SHAPES,
    _ATEN.index.Tensor,
    _ATEN.index_put.default,
    _ATEN.select.int,
    _ATEN.select_scatter.default,
    _ATEN.slice.Tensor,
    _ATEN.slice_scatter.default,
)
_CODES = {
    _ATEN.add.Tensor: Code.ADD,
    _ATEN.sub.Tensor: Code.ADD,
    _ATEN.mul.Tensor: Code.MULTIPLY,
    _ATEN.copy.default: Code.SET,
    _ATEN.fill.Scalar: Code.SET,
}
_EITHER = (_ATEN.add.Tensor, _ATEN.mul.Tensor)
