"""Makes a plan of plain values from another process, and checks all of them.

The process that traces a stranger's block tells its plan (`executor.plan.tell`), and may send anything. So nothing of it is code:
an operation is a name of `executor.plan.allowed`, an argument is a number, a name of a dtype, or the number of an earlier result.
The worker makes the program anew from that. It computes each shape itself, on tensors without elements, and gives up at the first
result that is too large. The forms of the program's reads come from the worker's own steps, and not from the process.

Size: one form, with a check for each part of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from executor.model.tree import SAMPLES
from executor.plan import allowed
from executor.plan.forms import Form, Group, Leaf
from executor.plan.ir import Read, Write
from executor.plan.plain import (
    DTYPE,
    FORMAT,
    INTEGERS,
    NODE,
    Unfit,
    dict_of,
    fits,
    index_of,
    list_of,
    named_by,
    tuple_of,
    unfit,
)
from executor.plan.refuse import Refused
from executor.plan.segments import Parts, parts_of
from executor.plan.step import Expression, Guard

MOST_NODES = 4000
MOST_READS = 2000
MOST_RESULTS = 4000
MOST_CONSTANTS = 512
MOST_KEPT_BYTES = 16 << 20  # of what the block gets of a step
MOST_MADE_BYTES = 64 << 20  # of all results of a step together
MOST_MADE = 16_384  # tensors that a step makes
MOST_WORK = 1 << 27  # about how many numbers a step computes
_MOST_GUARDS, _MOST_STEPS_OF_GUARD = 64, 16
_MOST_ITEMS = 1024  # of one argument, and parts into which an operation takes a tensor
_MOST_SIZE = 1 << 31
_SIGNS, _COMPARISONS = frozenset({"+", "-", "*", "//", "%"}), frozenset({"==", "!=", "<", "<=", ">", ">="})
_PRODUCTS = {"mm.default": 0, "bmm.default": 0, "addmm.default": 1, "baddbmm.default": 1}  # with the factor on the left
_SORTED = 16  # what sorting takes for each number

# Gives the form of a location's value, None if the value is not known; raises ValueError where there is no such location.
FormOf = Callable[[str, str], Form | None]


@dataclass(frozen=True)
class PortablePlan:
    """A plan that was made from plain values.

    Size: data: all that a step needs.

    Attributes:
        parts: the program; it has no operation in place.
        reads, writes, guards: as of `Plan`; a write's output is an index into `parts.results`.
        fixed: the constants, by the index of the program's input.
        carried: for each tensor that a step leaves for the next, the indices of the program's input and output.
        begins: the carried tensors before the first step, by the index of the input.
        every: the outputs that the block gets of every step.
        last: the outputs that it gets of the last step.
        kept: bytes of what the block gets of each step.
        size: bytes of the constants, and of all that a step makes.
    """

    parts: Parts
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    guards: tuple[Guard, ...]
    fixed: dict[int, torch.Tensor]
    carried: tuple[tuple[int, int], ...]
    begins: dict[int, torch.Tensor]
    every: tuple[int, ...]
    last: tuple[int, ...]
    kept: int
    size: int

    def holds(self, step: int) -> bool:
        """Return whether the plan is for a step."""
        return all(guard.holds(step) for guard in self.guards)


def make_ready() -> None:
    """Load what torch needs to compute some shapes, which takes seconds the first time."""
    with torch.inference_mode(False), torch.no_grad():
        torch.ops.aten.logsumexp.default(torch.empty(2, device="meta"), [0])


def made_of(told: Any, form_of: FormOf, device: torch.device, most_bytes: int) -> PortablePlan:
    """Return the plan that plain values are.

    Args:
        told: the values, from a process that may say anything.
        form_of: gives the forms of locations, of steps with one row.
        device: where the model computes.
        most_bytes: bound on the constants and carried tensors.

    Raises:
        Unfit: the values are no plan, or the plan is too large.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _Maker(told, form_of, device, most_bytes).made()
    except Unfit:
        raise
    except Refused as refused:
        raise Unfit(refused.what) from None
    except Exception as error:  # of torch's, where it computes shapes; or something is missing
        raise Unfit(f"{type(error).__name__}: {error}") from None


_FIELDS = frozenset("inputs nodes results reads writes guards fixed begins carried every last".split())


class _Maker:
    """Makes one plan.

    Size: all that is known of the plan so far, and what it takes.
    """

    def __init__(self, told: Any, form_of: FormOf, device: torch.device, most_bytes: int) -> None:
        if not isinstance(told, dict) or set(told) != _FIELDS:
            unfit("something is missing")
        self._told: dict[str, Any] = told
        self._form_of = form_of
        self._device = device
        self._most = most_bytes
        self._graph = fx.Graph()
        self._nodes: list[fx.Node] = []
        self._fixed: dict[int, torch.Tensor] = {}
        self._begins: dict[int, torch.Tensor] = {}
        self._tensors = self._bytes = self._work = 0  # of all operations so far
        self._known: dict[fx.Node, torch.Tensor] = {}  # constants whose elements can be looked at

    def made(self) -> PortablePlan:
        """Return the plan."""
        told = self._told
        reads = self._reads()
        self._inputs(reads)
        nodes = list_of(told["nodes"], MOST_NODES)
        for one in nodes:
            self._node(one)
        results = [self._nodes[index_of(one, len(self._nodes))] for one in list_of(told["results"], MOST_RESULTS)]
        if any(not isinstance(node.meta["val"], torch.Tensor) for node in results):
            unfit("a result is no tensor")
        self._graph.output(results)
        carried = self._carried(results)
        every, last = (self._kept(name, results) for name in ("every", "last"))
        kept = sum(_bytes_of(results[one].meta["val"]) for one in (*every, *last))
        if kept > MOST_KEPT_BYTES:
            unfit("the block gets too much of a step")
        inputs_of = [read.inputs for read in reads]
        return PortablePlan(
            parts=parts_of(self._graph, inputs_of, recorded=False),
            reads=tuple(reads),
            writes=tuple(self._writes(reads, results)),
            guards=tuple(map(_guard, list_of(told["guards"], _MOST_GUARDS))),
            fixed=self._fixed,
            carried=carried,
            begins=self._begins,
            every=every,
            last=last,
            kept=kept,
            size=sum(_bytes_of(one) for one in (*self._fixed.values(), *self._begins.values())) + self._bytes,
        )

    def _reads(self) -> list[Read]:
        found, seen = [], set[int]()
        for one in list_of(self._told["reads"], MOST_READS):
            path, kind, inputs, line = tuple_of(one, (str, str, list, int))
            form = self._form_of(path, kind)
            if form is None or form.rows != 1:
                unfit("it reads where the block has not been")
            numbers = [index_of(number, _MOST_SIZE) for number in list_of(inputs, _MOST_ITEMS)]
            if len(numbers) != len(list(form.leaves())) or seen & set(numbers) or len(set(numbers)) != len(numbers):
                unfit("its inputs are not those of its locations")
            seen.update(numbers)
            found.append(Read(path, kind, form, tuple(numbers), line))
        if not found:
            unfit("it reads nothing")
        return found

    def _inputs(self, reads: Sequence[Read]) -> None:
        """Make the program's inputs: of the locations, and constants and carried tensors."""
        shapes: dict[int, torch.Tensor] = {}
        for read in reads:
            for (leaf, _), number in zip(read.form.leaves(), read.inputs, strict=True):
                shapes[number] = torch.empty((1, *leaf.shape), dtype=leaf.dtype, device="meta")
        size = 0
        for name, into in (("fixed", self._fixed), ("begins", self._begins)):
            for number, given in dict_of(self._told[name], MOST_CONSTANTS).items():
                tensor, order = tuple_of(given, (torch.Tensor, list))
                if type(number) is not int or number in shapes or tensor.dtype not in allowed.DTYPES.values():
                    unfit("a constant is none")
                order = [index_of(one, tensor.dim()) for one in order]
                if sorted(order) != list(range(tensor.dim())):
                    unfit("a constant's dimensions are in no order")
                size += _bytes_of(tensor)
                if size > self._most:
                    unfit("its constants are too large")
                if tensor.numel() and not tensor.is_contiguous():  # not what travels as elements
                    unfit("a constant has no elements of its own")
                back = [order.index(dim) for dim in range(tensor.dim())]
                tensor = tensor.permute(back)
                into[number] = tensor.to(self._device)
                shapes[number] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        count = self._told["inputs"]
        if type(count) is not int or set(shapes) != set(range(len(shapes))) or count != len(shapes):
            unfit("its inputs are not numbered")
        for number in range(count):
            node = self._graph.placeholder(f"input_{number}")
            node.meta["val"] = shapes[number]
            self._nodes.append(node)
            if number in self._fixed:
                self._known[node] = self._fixed[number]

    def _node(self, told: Any) -> None:
        """Make an operation."""
        name, args, named = tuple_of(told, (str, list, dict))
        function = allowed.operations().get(name)
        if function is None:
            unfit("it has an operation that no plan has")
        if name == allowed.GETITEM:
            self._part(args, named)
            return
        arguments = function._schema.arguments
        if len(args) > len(arguments) or len(named) > len(arguments):
            unfit(f"{name} has too many arguments")
        by_name = {one.name: one for one in arguments}
        if any(key not in by_name or key in allowed.DEVICE_ARGUMENTS for key in named):
            unfit(f"{name} has an argument that it does not have")
        if any(one.name in allowed.DEVICE_ARGUMENTS or one.kwarg_only for one in arguments[: len(args)]):
            unfit(f"{name} has an argument in a place that it does not have")
        made_args = [self._argument(one.real_type, value) for one, value in zip(arguments, args, strict=False)]
        made_named = {key: self._argument(by_name[key].real_type, value) for key, value in named.items()}
        self._check(name, made_args, made_named)
        placed = "device" in by_name and not any(one.name == "self" for one in arguments)
        shaped = _run(function, made_args, {**made_named, **({"device": torch.device("meta")} if placed else {})})
        _check_result(name, shaped)
        node = self._graph.call_function(
            function, tuple(made_args), {**made_named, **({"device": self._device} if placed else {})}
        )
        node.meta["val"] = shaped
        self._nodes.append(node)
        self._weigh(name, node)
        if name == "clone.default" and made_args[0] in self._known:
            self._known[node] = self._known[made_args[0]]

    def _weigh(self, name: str, node: fx.Node) -> None:
        """Count what an operation takes."""
        made = list(_tensors_of(node))
        given = [one for source in node.all_input_nodes for one in _tensors_of(source)]
        self._tensors += len(made)
        self._bytes += sum(map(_bytes_of, made))
        largest = max((one.numel() for one in (*made, *given)), default=0)
        first = _PRODUCTS.get(name)
        if first is not None:
            largest = max(largest, made[0].numel() * max(1, node.args[first].meta["val"].shape[-1]))
        self._work += largest * (_SORTED if name.startswith(("sort", "topk")) else 1)
        if self._tensors > MOST_MADE or self._bytes > MOST_MADE_BYTES or self._work > MOST_WORK:
            unfit("a step makes or computes too much")

    def _part(self, args: list[Any], named: dict[Any, Any]) -> None:
        """Take one of several results of an operation."""
        if len(args) != 2 or named:
            unfit("a part of nothing")
        source, number = self._of(args[0]), args[1]
        value = source.meta["val"]
        if isinstance(value, torch.Tensor):
            unfit("a part of a tensor")
        node = self._graph.call_function(operator.getitem, (source, index_of(number, len(value))))
        node.meta["val"] = value[number]
        self._nodes.append(node)

    def _of(self, told: Any) -> fx.Node:
        """Return an earlier result."""
        tag, number = tuple_of(told, (str, int))
        if tag != NODE:
            unfit("an argument is no result")
        return self._nodes[index_of(number, len(self._nodes))]

    def _tensor(self, told: Any) -> fx.Node:
        node = self._of(told)
        if not isinstance(node.meta["val"], torch.Tensor):
            unfit("an argument is no tensor")
        return node

    def _argument(self, kind: Any, told: Any) -> Any:
        """Return an argument of a kind, as the operation's schema names it."""
        name = str(kind)
        if name.startswith("Optional["):
            if told is None:
                return None
            name = name[len("Optional[") : -1]
        if name.startswith("List["):
            inner = name[len("List[") : -1]
            items = list_of(told, _MOST_ITEMS)
            if inner == "Optional[Tensor]":
                return [None if one is None else self._tensor(one) for one in items]
            return [self._single(inner, one) for one in items]
        return self._single(name, told)

    def _single(self, name: str, told: Any) -> Any:
        if name == "Tensor":  # a number stands for a tensor of no dimension
            return told if fits("number", told) else self._tensor(told)
        if name == "ScalarType":
            return named_by(told, DTYPE, allowed.DTYPES)
        if name == "MemoryFormat":
            return named_by(told, FORMAT, allowed.FORMATS)
        if not fits(name, told):
            unfit(f"an argument is no {name}")
        return float(told) if name == "float" else told

    def _check(self, name: str, args: list[Any], named: dict[str, Any]) -> None:
        """Check what kernels do not, or what would take too much before a result's size is known."""
        tensors = [node.meta["val"] for node in _nodes_in((args, list(named.values())))]
        if allowed.divides_integers(name, [one.dtype for one in tensors]):
            unfit(f"{name} of integers")
        if name.startswith("arange.") and any(
            isinstance(one, int | float) and not -_MOST_SIZE < one < _MOST_SIZE for one in (*args, *named.values())
        ):
            unfit("arange of large numbers, whose kernel counts otherwise than its shape")
        at = allowed.INDICES.get(name)
        if at is not None:
            if len(args) <= at:
                unfit("an index is missing")
            self._check_indices(name, args, at)
        if name in ("split.Tensor", "unbind.int"):
            at_dim = 2 if name == "split.Tensor" else 1
            dim = args[at_dim] if len(args) > at_dim else named.get("dim", 0)
            length = tensors[0].shape[dim]
            each = max(1, args[1]) if name == "split.Tensor" else 1
            if length // each > _MOST_ITEMS:
                unfit(f"{name} into too many parts")

    def _check_indices(self, name: str, args: list[Any], at: int) -> None:
        source: torch.Tensor = args[0].meta["val"]
        if name == "index_select.default":
            dim = args[1]
            if source.dim() == 0 or not -source.dim() <= dim < source.dim():
                unfit("an index of no dimension")
            self._check_index(args[at], source.shape[dim], least=0)
            return
        if len(args[at]) > source.dim():
            unfit("more indices than dimensions")
        for dim, index in enumerate(args[at]):
            if index is not None:
                self._check_index(index, source.shape[dim], least=-source.shape[dim])

    def _check_index(self, node: fx.Node, length: int, least: int) -> None:
        """Check that an index is a constant, and in range."""
        known = self._known.get(node)
        if known is None:
            unfit("an index that is computed from values of the model")
        if known.dtype not in (torch.int64, torch.int32):
            unfit("an index that is no tensor of integers")
        if known.numel() and not least <= int(known.min()) <= int(known.max()) < length:
            unfit("an index out of range")

    def _carried(self, results: Sequence[fx.Node]) -> tuple[tuple[int, int], ...]:
        found, seen = [], set[int]()
        for one in list_of(self._told["carried"], MOST_CONSTANTS):
            number, output = tuple_of(one, (int, int))
            if number not in self._begins or number in seen:
                unfit("it carries what it has not")
            seen.add(number)
            result = results[index_of(output, len(results))].meta["val"]
            before = self._begins[number]
            if (result.shape, result.dtype) != (before.shape, before.dtype):
                unfit("what it carries changes its form")
            found.append((number, output))
        return tuple(found)

    def _kept(self, name: str, results: Sequence[fx.Node]) -> tuple[int, ...]:
        found = [index_of(one, len(results)) for one in list_of(self._told[name], MOST_RESULTS)]
        if len(set(found)) != len(found):
            unfit("a result is kept twice")
        return tuple(found)

    def _writes(self, reads: Sequence[Read], results: Sequence[fx.Node]) -> Iterator[Write]:
        segment_of: dict[fx.Node, int] = {}
        for number, read in enumerate(reads):
            for index in read.inputs:
                segment_of[self._nodes[index]] = number
        for node in self._graph.nodes:
            if node.op == "call_function":
                segment_of[node] = max((segment_of.get(one, 0) for one in node.all_input_nodes), default=0)
        changed = set[tuple[int, tuple[object, ...]]]()
        for one in list_of(self._told["writes"], MOST_READS):
            number, index, at, output, mutated = tuple_of(one, (int, int, tuple, int, bool))
            read = reads[index_of(number, len(reads))]
            if read.path == SAMPLES:
                unfit("it changes a sampled token")
            spots = list(_spots(read.form.tree, ()))
            leaf = next((leaf for leaf, path in spots if leaf.index == index and _equal_paths(path, at)), None)
            node = results[index_of(output, len(results))]
            if leaf is None or (number, at) in changed:
                unfit("it changes what is not there")
            changed.add((number, at))
            value = node.meta["val"]
            if tuple(value.shape) != (1, *leaf.shape) or value.dtype != leaf.dtype:
                unfit("it changes the form of a value")
            if segment_of.get(node, 0) > number:
                unfit("it changes a value with what comes later")
            yield Write(number, index, at, output, mutated)


def _spots(part: Any, path: tuple[object, ...]) -> Iterator[tuple[Leaf, tuple[object, ...]]]:
    """Yield the tensors of a form, at each path where they stand."""
    if isinstance(part, Leaf):
        yield part, path
    elif isinstance(part, Group):
        for key, item in zip(part.keys or range(len(part.items)), part.items, strict=True):
            yield from _spots(item, (*path, key))


def _equal_paths(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return len(one) == len(other) and all(
        type(mine) is type(yours) and mine == yours for mine, yours in zip(one, other, strict=True)
    )


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _nodes_in(one)


def _run(function: Any, args: Any, named: dict[str, Any]) -> Any:
    """Return the result of an operation on tensors without elements."""
    shapes = fx.node.map_arg((tuple(args), named), lambda node: node.meta["val"])
    return function(*shapes[0], **shapes[1])


def _check_result(name: str, made: Any) -> None:
    """Check that results are tensors of a size and a dtype that a plan may have."""
    items = made if isinstance(made, tuple | list) else [made]
    if len(items) > _MOST_ITEMS + 1:
        unfit(f"{name} makes too many tensors")
    for one in items:
        if not isinstance(one, torch.Tensor) or one.dtype not in allowed.DTYPES.values():
            unfit(f"{name} makes what no plan has")
        if one.device.type != "meta" or any(not 0 <= size < _MOST_SIZE for size in one.shape):
            unfit(f"{name} makes a tensor that is too large")
        if math.prod(one.shape) >= _MOST_SIZE:
            unfit(f"{name} makes a tensor that is too large")


def _guard(told: Any) -> Guard:
    steps, sign, number, outcome = tuple_of(told, (list, str, int, bool))
    operations = []
    for one in list_of(steps, _MOST_STEPS_OF_GUARD):
        do, operand, left = tuple_of(one, (str, int, bool))
        if do not in _SIGNS or not -INTEGERS <= operand < INTEGERS:
            unfit("a guard computes what no guard does")
        operations.append((do, operand, left))
    if sign not in _COMPARISONS or not -INTEGERS <= number < INTEGERS:
        unfit("a guard compares what no guard does")
    return Guard(Expression(tuple(operations)), sign, number, outcome)


def _tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:  # any shape
    value = node.meta["val"]
    yield from value if isinstance(value, tuple | list) else (value,)


def _bytes_of(tensor: torch.Tensor) -> int:  # any shape
    return tensor.numel() * tensor.element_size()
