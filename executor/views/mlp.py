"""Finds the parts of a layer's MLP: gate, up and down projections, or router and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

from executor.model.node import Node
from executor.model.tree import ModuleTree
from executor.views.probe import ProbeRun, same


@dataclass(frozen=True)
class MLP:
    """A layer's MLP.

    Attributes:
        gate, up: a projection and the columns of its whole output; None if there is none.
        down: the projection back to the stream.
        router: of a mixture of experts, the layer that computes the experts' logits.
        experts: of a mixture of experts, the module that runs the experts.
        inside: of a mixture of experts, the router if the experts' module runs it.
        shared: of a mixture of experts, the module of the experts that every token has and what is in it, if there is one.
        why_gate, why_up, why_down: what a refusal says about a missing part.
    """

    gate: tuple[Node, tuple[int, int] | None] | None = None
    up: tuple[Node, tuple[int, int] | None] | None = None
    down: Node | None = None
    router: Node | None = None
    experts: Node | None = None
    inside: Node | None = None
    shared: tuple[Node, MLP] | None = None
    why_gate: str = ""
    why_up: str = ""
    why_down: str = ""


_FUSED = "a mixture has one of each expert; use mlp.expert_act and mlp.expert_out, of the experts that a token chose"


def find_mlp(tree: ModuleTree, probe: ProbeRun, layer: str, attention: str) -> MLP:
    """Return the MLP of a layer whose attention lies at another path; "" without attention."""
    nodes = [
        node
        for name, node in tree.nodes.items()
        if name.startswith(layer + ".") and not (attention and (name + ".").startswith(attention + "."))
    ]
    experts = [node for node in nodes if isinstance(node.layer, MoERunner)]
    if experts:
        router = _router(probe, nodes, experts[0])
        shared = _shared(nodes, experts[0])
        return MLP(
            router=router,
            experts=experts[0],
            inside=router if _within(probe, router, experts[0]) else None,
            shared=None if shared is None else (shared, _plain(tree, probe, _below(nodes, shared))),
            why_gate=_FUSED,
            why_up=_FUSED,
            why_down=_FUSED,
        )
    return _plain(tree, probe, nodes)


def _plain(tree: ModuleTree, probe: ProbeRun, nodes: list[Node]) -> MLP:
    """Return the MLP among nodes that hold no mixture."""
    ran = [node for node in nodes if probe.at(node.path, "output") is not None]
    into = [
        node
        for node in ran
        if isinstance(node.layer, ColumnParallelLinear) and not isinstance(node.layer, QKVParallelLinear)
    ]
    back = [node for node in ran if isinstance(node.layer, RowParallelLinear)]
    if not into and not back:
        why = "this layer has no MLP"
        return MLP(why_gate=why, why_up=why, why_down=why)
    if len(into) != 1 or len(back) != 1:
        why = f"the layer has {len(into)} projections into an MLP and {len(back)} out of one; use their own paths"
        return MLP(why_gate=why, why_up=why, why_down=why)
    return _dense(tree, probe, into[0], back[0])


def _dense(tree: ModuleTree, probe: ProbeRun, into: Node, back: Node) -> MLP:
    module = into.layer
    assert isinstance(module, ColumnParallelLinear)
    if not isinstance(module, MergedColumnParallelLinear):
        return MLP(up=(into, None), down=back, why_gate="this architecture's MLP has no gate; use mlp.up and mlp.act")
    order = _gate_first(tree, probe, into) if len(module.output_sizes) == 2 else None
    if order is None:
        why = f"which columns of {into.path} are the gate could not be established; use {into.path}.output[0]"
        return MLP(down=back, why_gate=why, why_up=why)
    first, second = module.output_sizes
    left, right = (into, (0, first)), (into, (first, first + second))
    return MLP(gate=left if order else right, up=right if order else left, down=back)


def _gate_first(tree: ModuleTree, probe: ProbeRun, into: Node) -> bool | None:
    """Return whether the gate is the left half, or None if that is not clear.

    The activation is proportional to the other half, and not to the gate.
    """
    made = probe.at(into.path, "output")
    merged = made.tensors.get((0,)) if made is not None else None
    if made is None or merged is None:
        return None
    for begun in probe.after(made.index, "input"):
        given, module = begun.tensors.get((0, 0)), tree.nodes[begun.path].layer
        if given is None or given.shape != merged.shape or not torch.equal(given, merged) or module is None:
            continue
        left, right = torch.randn_like(merged).chunk(2, dim=-1)
        plain = module(torch.cat([left, right], dim=-1))
        if not isinstance(plain, torch.Tensor):
            continue
        linear_in_right = same(module(torch.cat([left, 2 * right], dim=-1)), 2 * plain)
        linear_in_left = same(module(torch.cat([2 * left, right], dim=-1)), 2 * plain)
        if linear_in_left != linear_in_right:
            return linear_in_right
    return None


def _shared(nodes: list[Node], experts: Node) -> Node | None:
    """Return the module of the experts that every token has, of a module that runs experts."""
    assert isinstance(experts.layer, MoERunner)
    shared = experts.layer.shared_experts
    return next((node for node in nodes if shared is not None and node.layer is shared._layer), None)


def _below(nodes: list[Node], above: Node) -> list[Node]:
    return [node for node in nodes if node.path.startswith(above.path + ".")]


def _within(probe: ProbeRun, inner: Node | None, outer: Node) -> bool:
    """Return whether a module runs inside of another."""
    if inner is None:
        return False
    begun, ended, begins = probe.at(outer.path, "input"), probe.at(outer.path, "output"), probe.at(inner.path, "input")
    return None not in (begun, ended, begins) and begun.index < begins.index < ended.index  # type: ignore[union-attr]


def _router(probe: ProbeRun, nodes: list[Node], experts: Node) -> Node | None:
    """Return the layer whose result decides which experts are chosen."""
    assert isinstance(experts.layer, MoERunner)
    count = experts.layer.moe_config.num_logical_experts
    for node in nodes:
        made = probe.at(node.path, "output")
        logits = made.tensors.get((0,), made.tensors.get(())) if made is not None else None
        if logits is not None and logits.dim() == 2 and logits.shape[1] == count:
            return node
    return None


def part_of_mlp(tree: ModuleTree, probe: ProbeRun, children: Sequence[str], attention: str) -> tuple[str, str]:
    """Return where a layer's MLP ends and begins.

    Returns:
        The path of the part that holds the MLP's last projection, and of the module that takes the MLP's input; "" for none.
    """
    begun: list[tuple[int, str]] = []
    for child in children:
        inside = [node for name, node in tree.nodes.items() if (name + ".").startswith(child + ".")]
        event = probe.at(child, "output")
        ends = any(isinstance(node.layer, RowParallelLinear | MoERunner) for node in inside)
        if child != attention and ends and event is not None:
            begun.append((event.index, child))
    if not begun:
        return "", ""
    _, part = min(begun)
    if not isinstance(tree.nodes[part].layer, RowParallelLinear):
        return part, part
    into = [child for child in children if isinstance(tree.nodes[child].layer, ColumnParallelLinear)]
    return part, into[0] if len(into) == 1 else ""
