"""Makes taps of a plan whose program has only operations of the tables.

Any other plan stays a plan. The program is followed without values. At each site it is a sequence of operations, and what the
block adds to its lists is the site's value after some of them. Constants are computed here, by torch, as the block would
compute them. A plan is not for the tables if it carries tensors from step to step, assigns a new value to a location, leaves
a value that the model does not go on with, or has another operation. `Tap.exact` holds for each tap that comes from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from executor.graphs.operations import ALL, Code, Refused, Tap
from executor.model.items import Path
from executor.plan.ir import Item, Plan

_ATEN = torch.ops.aten
_SAME = (_ATEN.clone.default, _ATEN.alias.default, _ATEN.detach.default, _ATEN.lift_fresh_copy.default)
_MOST_STEPS = 4096

# The tensors of a site: the module, "input" or "output", and the paths in the location's value.
SiteKey = tuple[str, str, tuple[Path, ...]]


@dataclass(frozen=True)
class _Cells:
    """Columns of a site after some operations.

    Attributes:
        read: the index of the location.
        leaves: the tensors of the location that the columns are, or are the sum of.
        done: the operations so far.
        columns: the first column and the column after the last.
        flat: whether the dimension of rows is gone: [columns] of a single row.
    """

    read: int
    leaves: tuple[int, ...]
    done: tuple[Tap, ...]
    columns: tuple[int, int]
    flat: bool = False

    def then(self, **tap: Any) -> _Cells:
        """Return the columns after one more operation on them."""
        return self._with(Tap(-1, columns=self.columns, **tap))

    def _with(self, *taps: Tap) -> _Cells:
        return _Cells(self.read, self.leaves, (*self.done, *taps), self.columns, self.flat)


@dataclass(frozen=True)
class _Changed:
    """For each row whether two values of a residual pair differ.

    `fits` is set once `any` was asked of the columns.
    """

    before: _Cells
    now: _Cells
    fits: bool


@dataclass(frozen=True)
class _Half:
    """One tensor of a residual pair into which a change is written."""

    leaf: int
    now: _Cells


@dataclass(frozen=True)
class Lowered:
    """A plan in the tables.

    Attributes:
        taps: for `Tables.join`.
        reads: for each output of the plan that a tap reads, the number of the tap, and the shape of the output.
        known: the outputs that are constants.
    """

    taps: tuple[Tap, ...]
    reads: Mapping[int, tuple[int, tuple[int, ...]]]
    known: Mapping[int, torch.Tensor]


@dataclass
class _Walk:
    """Follows a program.

    Attributes:
        values: what each node is: `_Cells`, `_Changed`, `_Half`, or a tensor.
    """

    plan: Plan
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def node(self, node: fx.Node) -> Any:
        """Return what a node gives.

        Raises:
            Refused: the tables have no such operation.
        """
        args = [self.values[one] if isinstance(one, fx.Node) else one for one in node.args]
        if not any(isinstance(self.values[one], _Cells | _Changed | _Half) for one in node.all_input_nodes):
            named = {key: fx.node.map_arg(one, self.values.__getitem__) for key, one in node.kwargs.items()}
            with torch.inference_mode(False), torch.no_grad():
                return node.target(*fx.node.map_arg(node.args, self.values.__getitem__), **named)
        name = str(node.target)
        rest = {key for key in node.kwargs if key != "memory_format"}
        made = self._pair(node.target, args)
        if made is None and isinstance(args[0], _Cells) and not rest:
            made = self._moved(node, args) if node.target in _MOVES else self._computed(node.target, args)
        if made is None and len(args) == 2 and isinstance(args[1], _Cells) and not rest and node.target in _EITHER:
            made = self._computed(node.target, args[::-1])
        if made is None or (isinstance(made, _Cells) and not self._fits(made, node)):
            raise Refused(f"the tables have no {name} as the block uses it")
        return made

    def _fits(self, cells: _Cells, node: fx.Node) -> bool:
        shape = (cells.columns[1] - cells.columns[0],)
        return tuple(node.meta["val"].shape) == (shape if cells.flat else (self.plan.rows, *shape))

    def _pair(self, target: Any, args: Sequence[Any]) -> Any:
        """Return the result of an operation of a residual pair.

        It is the sum, or the way back (`executor.views.view.Stream`).
        """
        first, second = args[0], args[1] if len(args) > 1 else None
        if target is _ATEN.add.Tensor and isinstance(first, _Cells) and isinstance(second, _Cells):
            raw = not first.done and not second.done and first.columns == second.columns and first.columns[0] == 0
            if raw and first.read == second.read and len(first.leaves) == len(second.leaves) == 1:
                return _Cells(first.read, (*first.leaves, *second.leaves), (), first.columns)
        if target is _ATEN.ne.Tensor and isinstance(first, _Cells) and isinstance(second, _Cells):
            pair = len(first.leaves) == 2 and not first.done and first.columns == second.columns
            if pair and (first.read, first.leaves) == (second.read, second.leaves):
                return _Changed(first, second, fits=False)
        if target is _ATEN.any.dim and isinstance(first, _Changed) and list(args[1:]) == [-1, True]:
            return _Changed(first.before, first.now, fits=True)
        if target is _ATEN.masked_fill.Scalar and isinstance(first, _Cells) and isinstance(second, _Changed):
            fits = second.fits and args[2] == 0 and _is_half(first, second.now, 0)
            return _Half(first.leaves[0], second.now) if fits else None
        if target is _ATEN.where.self and isinstance(first, _Changed) and first.fits and second == first.now:
            other = args[2]
            if isinstance(other, _Cells) and _is_half(other, first.now, 1):
                return _Half(other.leaves[0], first.now)
        return None

    def _moved(self, node: fx.Node, args: Sequence[Any]) -> Any:
        cells, target = args[0], node.target
        start, stop = cells.columns
        if target in _SAME:
            return cells
        if target is _ATEN.select.int:
            dim, index = args[1:]
            if cells.flat or self.plan.rows != 1 or dim != 0 or index not in (0, -1):
                return None
            return _Cells(cells.read, cells.leaves, cells.done, cells.columns, flat=True)
        if target is _ATEN.select_scatter.default:
            if cells.flat or self.plan.rows != 1 or args[2] != 0 or args[3] not in (0, -1):
                return None
            return self._scattered(cells, args[1], cells.columns, flat=True)
        scatters = target is _ATEN.slice_scatter.default
        given = [*args[2 if scatters else 1 :], *[None] * 4][:4]
        dim, begin, end, step = given[0] or 0, given[1] or 0, given[2], given[3] or 1
        if dim not in (-1, 0 if cells.flat else 1) or step != 1 or end is None:
            return None
        width = stop - start
        part = (start + min(begin, width), start + min(end, width))
        if not start <= part[0] < part[1] <= stop:
            return None
        if not scatters:
            return _Cells(cells.read, cells.leaves, cells.done, part, cells.flat)
        return self._scattered(cells, args[1], part, cells.flat)

    def _scattered(self, cells: _Cells, source: Any, part: tuple[int, int], flat: bool) -> Any:
        if isinstance(source, torch.Tensor):
            inner = _Cells(cells.read, cells.leaves, cells.done, part, flat)
            source = self._computed(_ATEN.copy.default, [inner, source])
        if not isinstance(source, _Cells) or (source.read, source.leaves) != (cells.read, cells.leaves):
            return None
        new = source.done[len(cells.done) :]
        inside = all(part[0] <= tap.columns[0] and tap.columns[1] <= part[1] for tap in new)
        if source.done[: len(cells.done)] != cells.done or source.columns != part or source.flat != flat or not inside:
            return None
        return _Cells(cells.read, cells.leaves, source.done, cells.columns, cells.flat)

    def _computed(self, target: Any, args: Sequence[Any]) -> Any:
        cells: _Cells = args[0]
        if target is _ATEN.neg.default:
            return cells.then(code=Code.MULTIPLY, number=-1.0)
        if target is _ATEN.clamp.default:
            low, high = [*args[1:], None][:2]
            if low == 0 or high == 0:
                return None
            bounds = {"low": low} if low is not None else {}
            return cells.then(code=Code.CLAMP, **bounds, **({"high": high} if high is not None else {}))
        code = _CODES.get(target)
        operand = None if code is None or len(args) != 2 else self._operand(cells, args[1])
        if code is None or operand is None:
            return None
        if target is _ATEN.sub.Tensor:
            operand = {key: -value for key, value in operand.items()}
        return cells.then(code=code, **operand)

    def _operand(self, cells: _Cells, value: Any) -> dict[str, Any] | None:
        if isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor):
            return None
        if not isinstance(value, torch.Tensor):
            return {"number": float(value)}
        dtype = next(
            leaf.dtype for leaf, _ in self.plan.reads[cells.read].form.leaves() if leaf.index == cells.leaves[0]
        )
        width = cells.columns[1] - cells.columns[0]
        if value.dtype != dtype or value.requires_grad:
            return None
        if value.dim() == 0:
            return {"number": float(value)}
        if value.shape[-1] != width or value.numel() != width:
            same = value.dim() == 2 and value.shape == (self.plan.rows, width) and bool((value == value[:1]).all())
            return {"vector": value[0].clone()} if same else None
        return {"vector": value.reshape(width)}


def _is_half(cells: _Cells, pair: _Cells, which: int) -> bool:
    """Return whether columns are one tensor of a pair, as the model gave it."""
    same = (cells.read, cells.columns, cells.leaves) == (pair.read, pair.columns, pair.leaves[which : which + 1])
    return same and not cells.done


_MOVES = (
    *_SAME,
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


def lower(
    plan: Plan,
    functional: fx.Graph,
    constants: Mapping[int, torch.Tensor],
    sites: Mapping[SiteKey, int],
    steps: tuple[int, int] = (0, ALL),
) -> Lowered:
    """Return a plan as taps; the constants have any shape.

    Args:
        plan: the plan.
        functional: its program without in-place operations.
        constants: the tensors of its other inputs, by the index of the program's input: constants and literals.
        sites: the sites of the model. A site of one tensor stands before a site of a pair with that tensor.
        steps: the first step and the step after the last, in which the plan's guards hold.

    Raises:
        Refused: the plan is not for the tables; the text says why.
    """
    if plan.carried:
        raise Refused(f"{plan.carried[0].name} is carried from step to step")
    if plan.guards and not (steps[1] - steps[0] <= _MOST_STEPS and all(map(plan.holds, range(*steps)))):
        raise Refused("the block does something else in some of the steps")
    walk, inputs = _Walk(plan), dict[int, Any](constants)
    for number, read in enumerate(plan.reads):
        for (leaf, _), index in zip(read.form.leaves(), read.inputs, strict=True):
            # A leaf of other than [rows, columns] is no site; it may be there unused.
            width = leaf.shape[0] if len(leaf.shape) == 1 else 0
            inputs[index] = _Cells(number, (leaf.index,), (), (0, width))
    results: Sequence[fx.Node] = ()
    placeholders = 0
    for node in functional.nodes:
        if node.op == "placeholder":
            walk.values[node] = inputs[placeholders]
            placeholders += 1
        elif node.op == "output":
            results = node.args[0]
        else:
            walk.values[node] = walk.node(node)
    made = [walk.values[node] for node in results]
    shapes = [tuple(node.meta["val"].shape) for node in results]
    return _Gathered(plan, made, shapes, sites, steps).lowered()


@dataclass
class _Gathered:
    """Puts the operations of all sites into taps."""

    plan: Plan
    made: Sequence[Any]
    shapes: Sequence[tuple[int, ...]]
    sites: Mapping[SiteKey, int]
    steps: tuple[int, int]

    def lowered(self) -> Lowered:
        wanted = sorted(set(_outputs(self.plan)))
        known = {i: self.made[i] for i in wanted if isinstance(self.made[i], torch.Tensor)}
        reads = {i: self.made[i] for i in wanted if i not in known}
        if not all(isinstance(one, _Cells) for one in reads.values()):
            raise Refused("a half of the residual stream is kept after the stream was changed")
        final = self._written(reads)
        used = {(cells.read, cells.leaves) for cells in reads.values()} | set(final)
        taps: list[Tap] = []
        tapped: dict[int, tuple[int, tuple[int, ...]]] = {}
        for read, leaves in sorted(used):
            several = [one for one in used if one[0] == read and len(one[1]) != len(leaves)]
            if several and any(key[0] == read for key in final):
                raise Refused("the residual stream and one of its halves are both used where one is changed")
            site = self._site(read, leaves)
            done = final.get((read, leaves), ())
            mine = {i: cells for i, cells in reads.items() if (cells.read, cells.leaves) == (read, leaves)}
            for k in range(len(done) + 1):
                for i, cells in mine.items():
                    if len(cells.done) == k:
                        if cells.done != done[:k]:
                            raise Refused("the block keeps a value that the model does not go on with")
                        tapped[i] = (len(taps), self.shapes[i])
                        taps.append(Tap(site, Code.READ, cells.columns, steps=self.steps))
                if k < len(done):
                    tap = done[k]
                    taps.append(
                        Tap(
                            site,
                            tap.code,
                            tap.columns,
                            steps=self.steps,
                            vector=tap.vector,
                            number=tap.number,
                            low=tap.low,
                            high=tap.high,
                        )
                    )
            if any(len(cells.done) > len(done) for cells in mine.values()):
                raise Refused("the block keeps a value that the model does not go on with")
        return Lowered(tuple(taps), tapped, known)

    def _written(self, reads: Mapping[int, _Cells]) -> dict[tuple[int, tuple[int, ...]], tuple[Tap, ...]]:
        """Return the operations at each changed site: the index of the location, and its tensors."""
        final: dict[tuple[int, tuple[int, ...]], tuple[Tap, ...]] = {}
        halves: dict[int, dict[int, _Cells]] = {}
        for write in self.plan.writes:
            if not write.mutated:
                raise Refused("the block assigns a new value to a location; change it in place: x[:] = value")
            value = self.made[write.output]
            key = (write.read, (write.leaf,))
            if isinstance(value, torch.Tensor):
                before = [cells.done for cells in reads.values() if (cells.read, cells.leaves) == key]
                width = value.shape[-1]
                base = _Cells(write.read, (write.leaf,), max(before, key=len, default=()), (0, width))
                value = _Walk(self.plan)._computed(_ATEN.copy.default, [base, value])
            if isinstance(value, _Half) and value.leaf == write.leaf:
                halves.setdefault(write.read, {})[write.leaf] = value.now
            elif isinstance(value, _Cells) and (value.read, value.leaves) == key and value.columns[0] == 0:
                final[key] = value.done
            else:
                raise Refused("the block writes a value that is not made of the location's own")
        for read, both in halves.items():
            nows = list(both.values())
            if len(nows) != 2 or nows[0] != nows[1] or set(both) != set(nows[0].leaves):
                raise Refused("one half of the residual stream is changed alone")
            final[read, nows[0].leaves] = nows[0].done
        return final

    def _site(self, read: int, leaves: tuple[int, ...]) -> int:
        location = self.plan.reads[read]
        paths = {leaf.index: path for leaf, path in location.form.leaves()}
        found = self.sites.get((location.path, location.kind, tuple(paths[leaf] for leaf in leaves)))
        if found is None:
            raise Refused(f"{location.path}.{location.kind} is no site")
        return found


def _outputs(plan: Plan) -> Iterator[int]:
    """Return the outputs that the block's lists and names get."""

    def of(item: Item) -> Iterator[int]:
        if item.kind == "tensor":
            yield item.output
            if item.snapshot >= 0:
                yield item.snapshot
        for one in (*item.items, *item.keys):
            yield from of(one)

    for append in plan.appends:
        for item in (append.item, append.key):
            if item is not None:
                yield from of(item)
    for _, item in plan.results:
        yield from of(item)
