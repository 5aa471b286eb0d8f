"""Records one step of a block as a graph of torch's operations, on tensors without elements.

Every operation that the block runs passes through here below torch's own composition, so the graph has exactly the kernels
that the block would run, in its order, in place where the block is. An operation whose result depends on elements, on
chance, or on memory that nobody wrote is refused with the notebook's line.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from executor.core.torch_modes import unseen
from executor.plan.in_ways import may_be_in_way
from executor.plan.refuse import ATTRIBUTES, Refused

CONSTANT, CARRIED, SERVED = "constant", "carried", "served"
_MASK = "keep all rows and mask: torch.where(condition, a, 0)"
DECIDE = "keep it a tensor; decide with torch.where(condition, a, b)"
_TAGS = {
    torch.Tag.data_dependent_output: ("takes a value out of the tensors", DECIDE),
    torch.Tag.dynamic_output_shape: ("has a shape that depends on values", _MASK),
    torch.Tag.nondeterministic_seeded: ("draws random numbers", "draw them before the loop"),
    torch.Tag.nondeterministic_bitwise: ("gives other bits in every run", "use another operation"),
}
_REFUSED = {
    **dict.fromkeys(
        ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
        ("has memory that nobody wrote", "write torch.zeros"),
    ),
    **dict.fromkeys(
        ("set_", "resize_", "resize_as_", "resize"), ("changes a tensor's memory", "make a new tensor: x[:3].clone()")
    ),
    **dict.fromkeys(
        ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        ("keeps running statistics", "write the normalisation out"),
    ),
}
_ONTO_HOST = torch.ops.aten._to_copy.default
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})

# What torch asks of a tensor by the way; its answer has no elements.
_QUESTIONS = frozenset(
    {
        torch.ops.prim.device.default,
        torch.ops.prim.layout.default,
        *(
            getattr(torch.ops.aten, name).default
            for name in ("is_contiguous", "sym_size", "sym_stride", "sym_numel", "dim")
        ),
    }
)


class Recorder(TorchDispatchMode):
    """Records the operations of one step.

    Args:
        filenames: the files of the user's code.
        device: where the model computes.

    Attributes:
        graph: the operations so far; placeholders stand where they were asked for.
        inputs: the placeholders.
        literals: tensors that the code made of numbers, each with its placeholder.
        changed: the storages that were written to.
        serving: the number of the location where the block is.
        device: where the model computes.
        condition: a scalar bool of the program: whether the block is where it is traced; None: it is.
        sized: whether code outside of this package asked a tensor for its size, or took one apart into a list of its parts.
    """

    def __init__(self, filenames: Iterable[str], device: torch.device) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.inputs: list[fx.Node] = []
        self.literals: list[tuple[fx.Node, torch.Tensor]] = []
        self.changed: set[int] = set()
        self._files = set(filenames)
        self.device = device
        self.condition: torch.Tensor | None = None
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[torch.Tensor] = []  # so that no id and no storage is used twice
        self._owners: dict[int, tuple[str, int]] = {}
        self._frozen: set[int] = set()
        self._barred: set[int] = set()
        self.serving = -1
        self.sized = False

    def add_files(self, filenames: Iterable[str]) -> None:
        """Note further files of the user's code."""
        self._files.update(filenames)

    def run(self, do: Callable[[], None]) -> None:
        """Run code and record it; new tensors are on the model's device, as in a block."""
        placed: AbstractContextManager[object] = nullcontext() if self.device.type == "cpu" else self.device
        with placed, torch.no_grad(), self._fake, self, _Watch(self):
            do()

    def line(self) -> int:
        """Return the line of the user's code that runs now, 0 if none does."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                return frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return 0

    def input(
        self,
        name: str,
        shape: tuple[int, ...],
        stride: tuple[int, ...] | None,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return a tensor without elements that is an input of the program.

        `device` None is the model's device.
        """
        device = device or self.device
        with _disable_current_modes(), torch.no_grad(), self._fake:
            if stride is None:
                made = torch.empty(shape, dtype=dtype, device=device)
            else:
                made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        node = self.graph.placeholder(name)
        self.inputs.append(node)
        self._note(made, node)
        return made

    def own(self, tensor: torch.Tensor, kind: str, number: int = 0) -> None:
        """Note the owner of a tensor's memory: a constant, a carried tensor, or a location's number."""
        self._owners[storage_of(tensor)] = (kind, number)

    def owner(self, tensor: torch.Tensor) -> tuple[str, int]:
        """Return of what a tensor's memory is part; ("", 0) for memory that the step itself made."""
        return self._owners.get(storage_of(tensor), ("", 0))

    def freeze(self, tensors: Iterable[torch.Tensor]) -> None:  # any shape
        """Refuse changes in place of tensors from now on, because a decision chose between them."""
        self._frozen.update(map(storage_of, tensors))

    def is_chosen(self, tensor: torch.Tensor) -> bool:  # any shape
        """Return whether a decision chose a tensor, or from it."""
        return storage_of(tensor) in self._frozen

    def bar(self, tensors: Iterable[torch.Tensor]) -> None:  # any shape
        """Refuse all uses of tensors by the block, which are not yet what the block would find."""
        self._barred.update(map(storage_of, tensors))

    def unbar(self) -> None:
        """The block goes on from the location of these tensors."""
        self._barred.clear()

    @contextmanager
    def own_use(self) -> Iterator[None]:
        """Return a context in which tensors are used that the block may not use."""
        before, self._barred = self._barred, set()
        try:
            yield
        finally:
            self._barred = before

    @contextmanager
    def certain(self) -> Iterator[None]:
        """Return a context without a condition."""
        before, self.condition = self.condition, None
        try:
            yield
        finally:
            self.condition = before

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """Return where the graph has a tensor.

        Raises:
            Refused: it came from outside.
        """
        found = self._nodes.get(id(tensor))
        if found is None:
            raise Refused(self.line(), "a tensor that the plan does not know", "read it under a name before the loop")
        return found

    def _note(self, tensor: torch.Tensor, node: fx.Node) -> None:
        node.meta["val"] = tensor
        if id(tensor) not in self._nodes:
            self._nodes[id(tensor)] = node
            self._kept.append(tensor)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        line = self.line()
        if function in _QUESTIONS:
            return function(*args, **named)
        if function is torch.ops.aten.lift_fresh.default:
            return self._literal(function(*args, **named), args[0])
        self._check(function, args, named, line)
        if self.condition is not None:
            return self._record_in_way(function, args, named, line, self.condition)
        return self._record(function, args, named, line)

    def _record_in_way(
        self, function: Any, args: tuple[Any, ...], named: dict[str, Any], line: int, condition: torch.Tensor
    ) -> Any:
        """Record an operation under a condition; it writes where the condition holds alone."""
        arguments = function._schema.arguments
        written = [i for i, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write]
        if not may_be_in_way(function, args, named, written):
            raise Refused(line, f"{_name(function)} where a value decides", DECIDE)
        if not written:
            return self._record(function, args, named, line)
        target = args[0]
        before = self._record(torch.ops.aten.clone.default, (target,), {}, line)
        made = self._record(function, args, named, line)
        chosen = self._record(torch.ops.aten.where.self, (condition, target, before), {}, line)
        self._record(torch.ops.aten.copy_.default, (target, chosen), {}, line)
        return made

    def _record(self, function: Any, args: tuple[Any, ...], named: dict[str, Any], line: int) -> Any:
        made = function(*args, **named)
        placed = tree_map(self._placed, args)
        node = self.graph.call_function(function, placed, tree_map(self._placed, named))
        node.meta["line"] = line
        if isinstance(made, torch.Tensor):
            self._result(made, node, line)
        elif isinstance(made, tuple | list):
            self.sized |= isinstance(made, list)
            for i, one in enumerate(made):
                if isinstance(one, torch.Tensor):
                    item = self.graph.call_function(operator.getitem, (node, i))
                    item.meta["line"] = line
                    self._result(one, item, line)
        else:
            raise Refused(line, f"{_name(function)} takes a value out of the tensors", DECIDE)
        return made

    def _result(self, tensor: torch.Tensor, node: fx.Node, line: int) -> None:
        here = tensor.device.type == self.device.type
        if not here and not (tensor.device.type == "cpu" and (node.target is _ONTO_HOST or self._on_host(node))):
            raise Refused(
                line,
                f"a tensor goes to another device ({tensor.device})",
                "save it as it is; the notebook gets it on its CPU",
            )
        if id(tensor) in self._nodes:  # an operation in place returns its own argument
            node.meta["val"] = tensor
        else:
            self._note(tensor, node)

    def _on_host(self, node: fx.Node) -> bool:
        """Return whether an operation works on tensors that the block took to the host."""
        inputs = node.all_input_nodes
        return bool(inputs) and all(one.meta["val"].device.type == "cpu" for one in inputs if "val" in one.meta)

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if self._barred and storage_of(value) in self._barred:
            raise Refused(
                self.line(),
                "a part of the residual stream is used after a change of the stream beside a decision on a value",
                "use the stream itself",
            )
        return self.node(value)

    def _literal(self, fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Note a tensor that the code made of numbers, each time anew."""
        holder = self.graph.placeholder(f"literal_{len(self.literals)}")
        with _disable_current_modes():
            self.literals.append((holder, real.detach().clone()))
        holder.meta["val"] = fake
        node = self.graph.call_function(torch.ops.aten.clone.default, (holder,))
        node.meta["line"] = self.line()
        self._note(fake, node)
        return fake

    def _check(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], line: int) -> None:
        if getattr(function, "namespace", "") not in ("aten", "prims"):
            raise Refused(line, f"{function} is no operation of torch's own", "use torch's functions")
        name = function._schema.name.partition("::")[2]
        if name in _INDEXED:
            if any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]):
                raise Refused(line, "a boolean index has a shape that depends on values", _MASK)
        else:
            reason = _REFUSED.get(name) or next((_TAGS[tag] for tag in function.tags if tag in _TAGS), None)
            if reason is not None:
                raise Refused(line, f"{_name(function)} {reason[0]}", reason[1])
        for argument, value in zip(function._schema.arguments, args, strict=False):
            self._check_written(argument, value, line)
        for argument in function._schema.arguments:
            if argument.name in kwargs:
                self._check_written(argument, kwargs[argument.name], line)

    def _check_written(self, argument: Any, value: Any, line: int) -> None:
        """Refuse a write to memory that the step may not change."""
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for tensor in tree_flatten(value)[0]:
            if not isinstance(tensor, torch.Tensor):
                continue
            kind, number = self.owner(tensor)
            if self._frozen and storage_of(tensor) in self._frozen:
                raise Refused(
                    line, "a tensor between which a value decided is changed in place", "make a new one: x = x + y"
                )
            if kind == CONSTANT:
                raise Refused(
                    line,
                    "a tensor from before the loop is changed in place",
                    "make a new one: total = total + x; for many values append to a list and torch.stack it after the loop",
                )
            if kind == SERVED and number != self.serving:
                raise Refused(
                    line,
                    "a value is changed after the block went on from its location",
                    "change it before the next location, or work on a clone",
                )
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
                raise Refused(line, "a tensor that repeats its elements is changed in place", "clone it first")
            self.changed.add(storage_of(tensor))


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors share which share memory."""
    with unseen():
        return int(tensor.untyped_storage()._cdata)


def _name(function: Any) -> str:
    """Return what a user calls an operation."""
    name: str = function._schema.name.partition("::")[2]
    return {"_local_scalar_dense": ".item()", "equal": "torch.equal"}.get(name, f"torch.{name}")


def _denied() -> dict[Any, str]:
    """Return the functions and properties of tensors that no plan has, with their names."""
    names = (
        *ATTRIBUTES,
        "__repr__",
        "__format__",
        "__reduce_ex__",
        "__deepcopy__",
        "__dlpack__",
        "__contains__",
        "__hash__",
    )
    found: dict[Any, str] = {}
    for name in names:
        member = getattr(torch.Tensor, name, None)
        if member is None or name in ("__class__", "__dict__", "nonzero"):
            continue
        if hasattr(member, "__get__") and hasattr(member, "__set__"):
            found[member.__get__] = name
            found[member.__set__] = name
        else:
            found[member] = name
    return found


_DENIED = _denied()
_SIZES = {getattr(torch.Tensor, name) for name in "size numel nelement __len__ __iter__ stride storage_offset".split()}
_SIZES |= {torch.numel, *(getattr(torch.Tensor, name).__get__ for name in ("shape", "nbytes"))}
_HERE = str(Path(__file__).resolve().parents[1])
_AS_TEXT = ("makes text of a tensor", "save the tensor itself")


class _Watch(TorchFunctionMode):
    """Refuses uses of tensors that need no operation of torch, such as their text and memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _DENIED.get(function)
        if name is not None:
            what, instead = ATTRIBUTES.get(name, _AS_TEXT)
            raise Refused(self._recorder.line(), f".{name} {what}", instead)
        if function in _SIZES and not sys._getframe(1).f_code.co_filename.startswith(_HERE):
            self._recorder.sized = True
        return function(*args, **(kwargs or {}))
