"""Whether a plan for a prompt's step is the plan for one row, run for each row by itself.

A program is for one row of a request (`executor.graphs.programs`). In the prompt's step it can run for all rows of a prompt at
once, as it does for all requests, if what the block computes of a row depends on this row alone. The plan for the prompt says
whether that is so. Its operations are followed one after the other. A value is some rows of the prompt, which one of its
dimensions counts, and each row has its counterpart in the plan for one row. An operation that may mix rows has no counterpart.

Size: each operation that keeps rows apart has its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from executor.graphs.lengths import Apart, Between, alike
from executor.graphs.lower import outputs_of
from executor.graphs.operations import Refused
from executor.graphs.thin import keyed
from executor.model.tree import PSEUDO
from executor.plan.ir import Plan

_ATEN = torch.ops.aten
_MIXED = "the block does not compute each row of its prompt by itself"

# Operations whose result has the shape of their tensors, element by element.
_ALIKE = frozenset("_to_copy copy lift_fresh_copy detach alias zeros_like ones_like full_like".split())
# Operations along dimensions that they are given, which stay or go.
_ALONG = frozenset("topk sort softmax _softmax log_softmax _log_softmax cumsum cumprod logcumsumexp flip".split())
_REDUCES = frozenset(
    "sum mean amax amin logsumexp std var linalg_vector_norm norm prod argmax argmin any all max min".split()
)
_SIZED = frozenset("view _unsafe_view reshape expand".split())  # with the result's shape among their arguments


@dataclass(frozen=True)
class Rows:
    """The rows of a prompt that a value is of.

    Attributes:
        first, after: the first row, and the row after the last.
        dim: the dimension that counts them; None: the value is of one row, and has the shape that it has in the plan for one row.
    """

    first: int
    after: int
    dim: int | None = None


@dataclass(frozen=True)
class ByRows:
    """How a plan for a prompt's step is the plan for one row.

    Attributes:
        first, after: the rows for which that plan runs: the first row, and the row after the last.
        outputs: the rows that each output is of, without constants.
    """

    first: int
    after: int
    outputs: Mapping[int, Rows]


def by_rows(plan: Plan, one: Plan) -> ByRows:
    """Return how a plan for a prompt's step is the plan for one row.

    Args:
        plan: the plan for the prompt's step.
        one: the plan of the same region for one row.

    Raises:
        Refused: it is another plan.
    """
    if one.rows != 1 or not alike(plan, one) or any(read.path in PSEUDO for read in plan.reads):
        raise Refused(_MIXED)
    if len(plan.literals) != len(one.literals) or not all(map(_equal, plan.literals, one.literals)):
        raise Refused(_MIXED)
    walk = _Walk(plan, one)
    written = [walk.written(write.read, write.leaf, write.output) for write in plan.writes]
    outputs = {output: rows for output in sorted(set(outputs_of(plan))) if (rows := walk.kept(output)) is not None}
    spans = {(rows.first, rows.after) for rows in written}
    if len(spans) > 1:
        raise Refused("the block changes some rows of its prompt in one place and other rows in another")
    first = min((rows.first for rows in outputs.values()), default=0)
    after = max((rows.after for rows in outputs.values()), default=1)
    if spans:
        [(low, high)] = spans
        if outputs and (first < low or after > high):
            raise Refused("the block keeps rows of its prompt beside those that it changes")
        first, after = low, high
    return ByRows(first, after, outputs)


def between(low: tuple[Plan, ByRows], high: tuple[Plan, ByRows], rows: int) -> ByRows:
    """Return how the plan for a length of prompt between two others is the plan for one row.

    Args:
        low, high: the plans for a shorter and a longer prompt, as of `by_rows` both.
        rows: of the prompt.

    Raises:
        Refused: it does not follow from the others.
    """
    (one, short), (other, long) = low, high
    at = Between(one.rows, other.rows, rows)
    if one.sized or other.sized or not alike(one, other) or short.outputs.keys() != long.outputs.keys():
        raise Refused(_MIXED)

    def of(mine: Rows, theirs: Rows) -> Rows:
        if mine.dim != theirs.dim:
            raise Apart
        return Rows(at.bound(mine.first, theirs.first), at.bound(mine.after, theirs.after), mine.dim)

    try:
        outputs = {output: of(mine, long.outputs[output]) for output, mine in short.outputs.items()}
        span = of(Rows(short.first, short.after), Rows(long.first, long.after))
    except Apart:
        raise Refused(_MIXED) from None
    return ByRows(span.first, span.after, outputs)


@dataclass(frozen=True)
class _Value:
    """What a node of the prompt's plan is.

    Attributes:
        node: its counterpart in the plan for one row.
        rows: its rows; None: it is a constant.
        base: a node whose rows it has beside `rows`; None: it has no other rows.
    """

    node: fx.Node
    rows: Rows | None = None
    base: fx.Node | None = None


class _Walk:
    """Follows the plan for a prompt beside the plan for one row, as of `by_rows`."""

    def __init__(self, plan: Plan, one: Plan) -> None:
        self._plan = plan
        self._results = plan.functional.results
        self._same: dict[fx.Node, fx.Node] = {}  # of nodes with one value, the first
        self._known: dict[object, fx.Node] = {}
        for node in one.functional.graph.nodes:
            if node.op == "call_function":
                self._same[node] = self._known.setdefault(_key(node, self._same.__getitem__), node)
            else:
                self._same[node] = node
        self._wanted = [self._same[node] for node in one.functional.results]
        self._values: dict[fx.Node, _Value] = {}
        for mine, theirs in zip(plan.functional.inputs, one.functional.inputs, strict=True):
            self._note(mine, _Value(theirs))
        for read in plan.reads:
            for index in read.inputs:
                self._values.pop(plan.functional.inputs[index], None)
                self._note(plan.functional.inputs[index], _Value(one.functional.inputs[index], Rows(0, plan.rows, 0)))
        for node in plan.functional.graph.nodes:
            if node.op == "call_function" and all(one in self._values for one in node.all_input_nodes):
                self._note(node, self._of(node))

    def kept(self, output: int) -> Rows | None:
        """Return the rows of an output, None of a constant.

        Raises:
            Refused: it is no rows.
        """
        found = self._values.get(self._results[output])
        if found is None or found.base is not None or found.node is not self._wanted[output]:
            raise Refused(_MIXED)
        return found.rows

    def written(self, read: int, leaf: int, output: int) -> Rows:
        """Return the rows that a write changes; raises as `kept`."""
        found = self._values.get(self._results[output])
        if found is None or found.rows is None or found.node is not self._wanted[output]:
            raise Refused(_MIXED)
        own = self._plan.functional.inputs[self._plan.reads[read].inputs[leaf]]
        if found.base is None and (found.rows.first, found.rows.after, found.rows.dim) != (0, self._plan.rows, 0):
            raise Refused(_MIXED)
        if found.base is not None and _origin(found.base) is not own:
            raise Refused(_MIXED)
        return found.rows

    def _note(self, node: fx.Node, found: _Value | None) -> None:
        """Note what a node is, if its counterpart has the shape that one row has."""
        if found is None:
            return
        one, other = node.meta.get("val"), found.node.meta.get("val")
        if isinstance(one, torch.Tensor):
            if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.device != other.device:
                return
            shape, rows = list(one.shape), found.rows
            if found.base is not None:
                shape[0] = 1
            elif rows is not None and rows.dim is not None:
                if shape[rows.dim] != rows.after - rows.first:
                    return
                shape[rows.dim] = 1
            if tuple(shape) != tuple(other.shape):
                return
        self._values[node] = found

    def _find(self, node: fx.Node, shape: Sequence[int] = (), **changed: Any) -> fx.Node | None:
        """Return the counterpart of a node, by its operation and its arguments.

        Args:
            node: of the plan for the prompt.
            shape: as of `_key`.
            changed: arguments that are others for one row.
        """
        return self._known.get(_key(node, lambda one: self._values[one].node, shape, changed))

    def _of(self, node: fx.Node) -> _Value | None:
        """Return what an operation gives; None: nothing that is known."""
        inputs = [self._values[one] for one in node.all_input_nodes]
        if any(one.base is not None for one in inputs):
            return self._of_edited(node)
        spans = {(one.rows.first, one.rows.after) for one in inputs if one.rows is not None}
        own = self._find(node)
        if not spans:
            return own and _Value(own)
        scattered = self._scattered(node)
        if scattered is not None:
            return scattered
        if len(spans) > 1:
            return None
        [(first, after)] = spans
        if after - first == 1:  # one row has the shapes of the plan for one row, so any operation is the same
            return own and _Value(own, Rows(first, after))
        return self._of_rows(node, first, after, own)

    def _of_rows(self, node: fx.Node, first: int, after: int, own: fx.Node | None) -> _Value | None:
        """Return what an operation on two or more rows gives; `own` is what `_find` returns."""
        name = _name(node)
        if name in ("slice", "select"):
            source = node.args[0]
            at = self._values[source].rows
            if at is not None and at.dim == _dim(node.args[1], source):
                return self._cut(node, name, at)
        if name in _SIZED:
            at = self._values[node.args[0]].rows
            dim = None if at is None or at.dim is None else _viewed(node, at.dim, name == "expand")
            if dim is None:
                return None
            shape = list(node.meta["val"].shape)
            shape[dim] = 1
            own = self._find(node, shape)
        else:
            dim = self._dim_of(node, name)
        return None if own is None or dim is None else _Value(own, Rows(first, after, dim))

    def _cut(self, node: fx.Node, name: str, at: Rows) -> _Value | None:
        """Return some of the rows of a value."""
        source = node.args[0]
        mine = self._values[source]
        if name == "select":
            row = node.args[2] + (source.meta["val"].shape[at.dim] if node.args[2] < 0 else 0)
            own = self._find(node, index=0)
            return own and _Value(own, Rows(at.first + row, at.first + row + 1))
        start, end, stride = node.args[2:5]
        if stride != 1 or end <= start:
            return None
        count = end - start
        return _Value(mine.node, Rows(at.first + start, at.first + end, None if count == 1 else at.dim))

    def _scattered(self, node: fx.Node) -> _Value | None:
        """Return a value some of whose rows have been changed; None if the operation is another."""
        name = _name(node)
        if name not in ("slice_scatter", "select_scatter"):
            return None
        base, source = node.args[0], node.args[1]
        mine, new = self._values[base], self._values[source]
        before = mine.rows
        if before is None or before.dim != 0 or _dim(node.args[2], base) != 0 or new.rows is None:
            return None
        if (before.first, before.after) != (0, self._plan.rows) or before.after == 1:
            return None
        return self._edited(node, name, base, mine.node, new)

    def _edited(self, node: fx.Node, name: str, base: fx.Node, own: fx.Node, new: _Value) -> _Value | None:
        """Return a value whose rows `new` are others than those of `base`.

        `own` is the counterpart of the value that is changed.
        """
        rows, size = new.rows, self._plan.rows
        assert rows is not None
        if name == "select_scatter":
            row = node.args[3] + (size if node.args[3] < 0 else 0)
            found = self._find(node, index=0) if (row, row + 1, None) == (rows.first, rows.after, rows.dim) else None
            return found and _Value(found, rows, base)
        start, end, stride = node.args[3:6]
        fits = stride == 1 and (start, end) == (rows.first, rows.after) and rows.dim in (0, None)
        return _Value(new.node, rows, base) if fits else None

    def _of_edited(self, node: fx.Node) -> _Value | None:
        """Return a copy of a value some of whose rows have been changed, or these rows."""
        name, base = _name(node), node.args[0]
        if not isinstance(base, fx.Node):
            return None
        mine = self._values[base]
        if mine.base is None or mine.rows is None:
            return None
        rows = mine.rows
        if name in ("clone", "detach", "alias") and len(node.all_input_nodes) == 1:
            found = self._find(node)
            return found and _Value(found, rows, mine.base)
        if name in ("slice_scatter", "select_scatter") and _dim(node.args[2], base) == 0:
            new = self._values[node.args[1]] if isinstance(node.args[1], fx.Node) else None
            same = (
                new is not None
                and new.rows is not None
                and (new.rows.first, new.rows.after)
                == (
                    rows.first,
                    rows.after,
                )
            )
            return self._edited(node, name, mine.base, mine.node, new) if same and new is not None else None
        if name == "select" and _dim(node.args[1], base) == 0:
            row = node.args[2] + (self._plan.rows if node.args[2] < 0 else 0)
            found = self._find(node, index=0) if rows.first <= row < rows.after else None
            return found and _Value(found, Rows(row, row + 1))
        if name == "slice" and _dim(node.args[1], base) == 0:
            start, end, stride = node.args[2:5]
            if stride == 1 and rows.first <= start < end <= rows.after:
                return _Value(mine.node, Rows(start, end, None if end - start == 1 else 0))
        return None

    def _dim_of(self, node: fx.Node, name: str) -> int | None:
        """Return the dimension of the rows in what an operation gives; None if it may mix them."""
        if node.target is getitem:
            at = self._values[node.args[0]].rows
            return None if at is None else at.dim
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        if torch.Tag.pointwise in node.target.tags or name in _ALIKE:
            return self._elementwise(node)
        given = _arguments(node)
        source = next((one for one in (given.get("self"), given.get("input")) if isinstance(one, fx.Node)), None)
        if name in ("mm", "addmm", "mv"):
            return self._product(given, name)
        if name in ("cat", "stack"):
            return self._joined(given, name)
        if source is None:
            return None
        at = self._values[source].rows
        alone = all(self._values[one].rows is None for one in node.all_input_nodes if one is not source)
        if at is None or at.dim is None or not alone:
            return self._picked(given, name)
        return _kept(at.dim, source.meta["val"], given, name)

    def _elementwise(self, node: fx.Node) -> int | None:
        """Return the dimension of the rows after an operation on elements."""
        out, at = node.meta["val"], set[int]()
        for one in node.all_input_nodes:
            rows = self._values[one].rows
            if rows is not None and rows.dim is not None:
                at.add(rows.dim - one.meta["val"].dim())
        if len(at) != 1:
            return None
        [dim] = at
        for one in node.all_input_nodes:
            value = one.meta["val"]
            if self._values[one].rows is None and value.dim() >= -dim and value.shape[dim] != 1:
                return None
        return int(out.dim() + dim)

    def _product(self, given: Mapping[str, Any], name: str) -> int | None:
        """Return the dimension of the rows after a product with a constant matrix."""
        first, second = (given["mat1"], given["mat2"]) if name == "addmm" else (given["self"], None)
        if second is None:
            second = given["vec"] if name == "mv" else given["mat2"]
        bias = self._values[given["self"]] if name == "addmm" else None
        if bias is not None and (bias.rows is not None or _lines(given["self"]) > 1):
            return None
        one, other = self._values[first].rows, self._values[second].rows
        if one is not None and one.dim == 0 and other is None:
            return 0
        return 1 if one is None and other is not None and other.dim == 1 and name == "mm" else None

    def _joined(self, given: Mapping[str, Any], name: str) -> int | None:
        """Return the dimension of the rows after tensors were put together along another."""
        tensors = given["tensors"]
        dims = {None if (rows := self._values[one].rows) is None else rows.dim for one in tensors}
        [dim] = dims if len(dims) == 1 else [None]
        if dim is None:
            return None
        size = tensors[0].meta["val"].dim() + (name == "stack")
        at = given["dim"] % size
        if name == "stack":
            return dim + (at <= dim)
        return None if at == dim else dim

    def _picked(self, given: Mapping[str, Any], name: str) -> int | None:
        """Return the dimension of the rows after each row has picked some elements."""
        source = given["self"]
        at = self._values[source].rows
        if name == "index":
            indices = [(i, one) for i, one in enumerate(given["indices"]) if one is not None]
            if at is None and len(indices) == 1:
                rows = self._values[indices[0][1]].rows
                return None if rows is None or rows.dim is None else indices[0][0] + rows.dim
            return None
        if at is None or at.dim is None:
            return None
        if name in ("slice_scatter", "select_scatter"):
            along, rows = given["dim"] % source.meta["val"].dim(), self._values[given["src"]].rows
            mine = at.dim - (along < at.dim) if name == "select_scatter" else at.dim
            return at.dim if along != at.dim and rows is not None and rows.dim == mine else None
        if name not in ("gather", "scatter", "scatter_add"):
            return None
        others = [given["index"], *(one for one in [given.get("src")] if isinstance(one, fx.Node))]
        found = [self._values[one].rows for one in others]
        same = all(rows is not None and rows.dim == at.dim for rows in found)
        return at.dim if same and given["dim"] % source.meta["val"].dim() != at.dim else None


def _kept(dim: int, value: torch.Tensor, given: Mapping[str, Any], name: str) -> int | None:  # any shape
    """Return where the dimension of the rows is after an operation on one tensor.

    It is None if the operation may mix rows.

    Args:
        dim: where it is before.
        value: the tensor.
        given: the operation's arguments by name.
        name: the operation.
    """
    count = value.dim()

    def listed(dims: Any) -> list[int]:
        return [one % count for one in (dims if isinstance(dims, list | tuple) else [dims])]

    if name in ("t", "transpose", "permute"):
        order = list(range(count))
        if name == "permute":
            order = listed(given["dims"])
        else:
            one, other = listed((0, -1) if name == "t" else (given["dim0"], given["dim1"]))
            order[one], order[other] = order[other], order[one]
        return order.index(dim)
    if name == "unsqueeze":
        return dim + (given["dim"] % (count + 1) <= dim)
    if name == "native_layer_norm":
        return dim if dim < count - len(given["normalized_shape"]) else None
    if name == "index":
        indices = [(i, one) for i, one in enumerate(given["indices"]) if one is not None]
        if len(indices) != 1 or indices[0][0] == dim:
            return None
        [(at, index)] = indices
        return dim if dim < at else dim + index.meta["val"].dim() - 1
    dims = given.get("dims" if name == "flip" else "dim")
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return None
    along = listed(dims)
    if dim in along:
        return None
    if name in _ALONG or name in ("slice", "split", "split_with_sizes", "index_select"):
        return dim
    if name == "squeeze":
        return dim - sum(one < dim for one in set(along) if value.shape[one] == 1)
    if name in ("select", "unbind"):
        return dim - (along[0] < dim)
    if name in _REDUCES:
        return dim if given.get("keepdim") else dim - sum(one < dim for one in set(along))
    return None


def _viewed(node: fx.Node, dim: int, expands: bool) -> int | None:
    """Return where the dimension of the rows is after a view; None if it is not alone there."""
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
    if expands:
        found = dim + len(after) - len(before)
        return found if after[found] == before[dim] else None
    ahead = 1
    for size in before[:dim]:
        ahead *= size
    so_far = 1
    for at, size in enumerate(after):
        if so_far == ahead and size == before[dim]:
            return at
        so_far *= size
    return None


def _key(
    node: fx.Node, of: Callable[[fx.Node], fx.Node], shape: Sequence[int] = (), changed: Mapping[str, Any] = {}
) -> object:
    """Return what stands for the value of a node.

    Args:
        node: the node.
        of: returns what stands for a node among its arguments.
        shape: of the value for one row, if the shape is an argument; (): as it is.
        changed: arguments that are others for one row.
    """
    given: Any = node.args, dict(node.kwargs)
    name = _name(node)
    if name in _SIZED:
        given = node.args[:1], {"shape": list(shape or node.meta["val"].shape)}
    elif name in ("select", "select_scatter"):
        at = 1 if name == "select" else 2
        dim, index = _dim(node.args[at], node.args[0]), node.args[at + 1]
        size = node.args[0].meta["val"].shape[dim]
        given = node.args[:at], {"dim": dim, "index": index + size if index < 0 else index}
    if changed:
        given = given[0], {**given[1], **changed}
    args = fx.node.map_arg(given[0], of), fx.node.map_arg(given[1], of)
    return node.target, keyed(args[0]), keyed(args[1])


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operation by name, with the defaults of missing arguments."""
    arguments = node.target._schema.arguments
    given = {one.name: one.default_value for one in arguments if one.has_default_value()}
    given.update(zip((one.name for one in arguments), node.args, strict=False))
    return given | dict(node.kwargs)


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name.partition("::")[2])


def _dim(dim: Any, node: Any) -> int:
    return int(dim) % int(node.meta["val"].dim())


def _lines(node: fx.Node) -> int:
    """Return how many rows the term of a product has; with one it is the same for all rows."""
    value = node.meta["val"]
    return int(value.shape[0]) if value.dim() == 2 else 1


def _origin(node: fx.Node) -> fx.Node:
    """Return the node of which a node is a copy."""
    while node.op == "call_function" and _name(node) in ("clone", "detach", "alias"):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:  # any shape
    return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
