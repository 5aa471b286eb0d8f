"""What the host computes of values that taps read, where nothing in the model depends on it.

A block often keeps a value in another form than the model has it: `x.float()`, `x[-1]`, `x[:, ::2]`, `x - mean`, a running sum.
The taps read what the model has. When the request's loop is over, its tail runs once on the values of all steps, with a dimension
of steps before the others. A loop that passes tensors from step to step has a tail that runs step by step.

The operations of a tail give the same bits on the host and on the device, for any number of rows. Moves of elements, changes of
the floating-point dtype and comparisons are such operations, and so are sums, differences and products of elements. Reductions,
matrix products, divisions and transcendental functions are not, because their bits depend on the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

_MOVES = """clone detach alias view reshape _unsafe_view slice select unsqueeze squeeze expand permute transpose t cat stack
split split_with_sizes unbind slice_scatter select_scatter flip roll copy repeat diagonal _reshape_alias lift_fresh_copy getitem
constant_pad_nd"""
_INDEXED = "index index_select gather"
_CASTING = "copy cat stack where slice_scatter select_scatter".split()
_COMPARED = "eq ne lt le gt ge isnan isinf logical_and logical_or logical_not where neg abs"
_SUMS = "add sub"
_PRODUCTS = "mul"
MOST_ELEMENTS = 2 << 20  # that a tail computes in one step, because the engine waits for all of its steps at once
_AT_ONCE = 8 << 20  # elements that are in memory at once, beside the results
_FREE = frozenset(f"{_MOVES} {_INDEXED} {_COMPARED}".split())
_MATHS = frozenset(f"{_SUMS} {_PRODUCTS}".split())
_WIDE = (torch.float32, torch.float64)


def name_of(node: fx.Node) -> str:
    """Return the name of a node's operation, without its overload."""
    schema = getattr(node.target, "_schema", None)
    return str(getattr(node.target, "__name__", node.target) if schema is None else schema.name.partition("::")[2])


def allowed(node: fx.Node) -> bool:
    """Return whether a tail may have a node's operation on its arguments."""
    name, made = name_of(node), node.meta.get("val")
    if name == "_to_copy":
        rest = set(node.kwargs) - {"dtype", "device", "layout", "memory_format", "non_blocking"}
        device = node.kwargs.get("device")
        onto_host = device is None or torch.device(device).type == "cpu"
        return not rest and onto_host and made.dtype.is_floating_point and _val(node.args[0]).dtype.is_floating_point
    if name in _CASTING and any(_val(one).dtype not in (made.dtype, torch.bool) for one in node.all_input_nodes):
        return False
    if name in _FREE:
        return not set(node.kwargs) - {"memory_format"}
    if name not in _MATHS or node.kwargs:
        return False
    tensors = [_val(one) for one in node.args if isinstance(one, fx.Node)]
    alike = all(one.dtype == made.dtype and one.dim() > 0 for one in tensors) and made.dtype.is_floating_point
    # Beside a number, the CPU rounds in another way than CUDA to a narrow dtype.
    return alike and (len(tensors) == len(node.args) or made.dtype in _WIDE or name in _PRODUCTS.split())


def checked(node: fx.Node) -> bool:
    """Return whether a node's operation may fail for what its constants are."""
    return name_of(node) in _INDEXED.split()


def _val(node: Any) -> torch.Tensor:  # any shape
    found: torch.Tensor = node.meta["val"]
    return found


@dataclass(frozen=True)
class Passed:
    """A tensor that each step leaves for the next step.

    Attributes:
        into: the input of the program.
        out: the node that the next step gets.
    """

    into: fx.Node
    out: fx.Node


@dataclass(frozen=True)
class Tail:
    """A part of a plan's program that the host runs.

    Attributes:
        nodes: its operations, in order.
        given: the nodes that taps read: the number of the tap, and the shape.
        constants: the nodes that are constants.
        passed: what steps pass on.
        results: the node of each output of the plan that the tail computes.
        values: the values of the constants, and what the first step gets.
    """

    nodes: tuple[fx.Node, ...]
    given: Mapping[fx.Node, tuple[int, tuple[int, ...]]]
    constants: tuple[fx.Node, ...]
    passed: tuple[Passed, ...]
    results: Mapping[int, fx.Node]
    values: Mapping[fx.Node, torch.Tensor] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """The elements of all that the tail computes in one step."""
        return sum(_val(node).numel() for node in self.nodes if "val" in node.meta)

    def filled(self, values: Mapping[fx.Node, torch.Tensor]) -> Tail:  # any shape
        """Return the tail with its constants, and with what the first step gets."""
        needed = (*self.constants, *(one.into for one in self.passed))
        return replace(self, values={node: values[node] for node in needed})

    def run(self, stacked: Callable[[int], torch.Tensor], steps: int) -> dict[int, torch.Tensor]:
        """Return what the tail computes in all steps, by output: [steps, ...] each.

        Args:
            stacked: returns what a tap read: [steps, rows, columns], all on one device.
            steps: how many steps; at least one.
        """
        given = [stacked(tap).reshape(steps, *shape) for tap, shape in self.given.values()]
        constants = {node: tensor.detach() for node, tensor in self.values.items()}
        if given:
            constants = {node: tensor.to(given[0].device) for node, tensor in constants.items()}
        outputs = list(self.results)
        with torch.inference_mode(False), torch.no_grad():
            if not self.passed and given:
                at_once = max(1, _AT_ONCE // max(1, self.elements))
                parts = [
                    torch.func.vmap(lambda *mine: self._step(mine, constants, {}))(
                        *(one[i : i + at_once] for one in given)
                    )
                    for i in range(0, steps, at_once)
                ]
                made = [one[0] if len(one) == 1 else torch.cat(one) for one in zip(*parts, strict=True)]
            else:
                made = self._steps(given, constants, steps)
        return dict(zip(outputs, made, strict=True))

    def _steps(
        self,
        given: list[torch.Tensor],  # [steps, ...]
        constants: Mapping[fx.Node, torch.Tensor],
        steps: int,
    ) -> list[torch.Tensor]:
        state = {one.into: constants[one.into] for one in self.passed}
        found: list[list[torch.Tensor]] = []
        for i in range(steps):
            env: dict[fx.Node, Any] = {}
            found.append([one.clone() for one in self._step([one[i] for one in given], constants, state, env)])
            state = {one.into: env[one.out] for one in self.passed}
        return [torch.stack(values) for values in zip(*found, strict=True)]

    def _step(
        self,
        given: Any,
        constants: Mapping[fx.Node, torch.Tensor],  # any shape, as the others
        state: Mapping[fx.Node, torch.Tensor],
        env: dict[fx.Node, Any] | None = None,
    ) -> list[Any]:
        """Return the results of one step; `env` gets the value of each node."""
        env = {} if env is None else env
        env.update(constants)
        env.update(state)
        env.update(zip(self.given, given, strict=True))
        for node in self.nodes:
            args = fx.node.map_arg(node.args, env.__getitem__)
            env[node] = node.target(*args, **fx.node.map_arg(node.kwargs, env.__getitem__))
        return [env[node] for node in self.results.values()]
