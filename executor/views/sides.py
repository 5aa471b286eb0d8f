"""Finds what a layer's attention and MLP are given, and what they add to the stream.

A part's output counts as what it adds only if a recorded forward shows the stream before it, plus this output, as the stream
after it. A second forward, in which the output was changed in place, must show the same with the changed output.

What a part is given may be a tensor that the layer uses elsewhere too. A change of such a tensor would reach more than the part,
so it can be read and not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from executor.model.items import Path
from executor.model.layouts import Unknown
from executor.model.node import Node, Unreachable, View
from executor.model.tree import ModuleTree
from executor.views.probe import Event, ProbeRun, multiple, record, same, weights
from executor.views.stream import Point
from executor.views.view import Part, Scaled, Shared

_NOT_SHOWN = (
    "the layer has no such part, or which of its tensors the part adds to the stream could not be established; read the "
    "outputs of the layer's modules"
)
SIDES = ("attn_in", "attn_out", "mlp_in", "mlp_out")


@dataclass(frozen=True)
class Side:
    """One tensor of a module: what a part of a layer is given, or what it adds.

    Attributes:
        path, kind, at: the module, which of its locations, and where the tensor is in the location's value.
        factor: what the layer multiplies the tensor with before it adds it.
        shared: what a change would reach beside the part; "" if nothing.
        why: the reason, if there is no such tensor.
    """

    path: str = ""
    kind: str = ""
    at: Path = ()
    factor: float = 1.0
    shared: str = ""
    why: str = ""


@dataclass(frozen=True)
class Layer:
    """A layer of which the sides are looked for.

    Attributes:
        children: the paths of its parts.
        attention: the part that holds the attention; "" if there is none.
        mlp: the part that holds the MLP's last projection; "" if there is none.
        into: the module that takes the MLP's input.
        pre, middle, post: the stream before, in and after the layer.
    """

    children: Sequence[str]
    attention: str
    mlp: str
    into: str
    pre: Point
    middle: Point
    post: Point


class SideFinder:
    """Finds the sides of a layer in a probe run.

    Args:
        probe: the run.
        width: the width of the stream.
        layer: the layer.
    """

    def __init__(self, probe: ProbeRun, width: int, layer: Layer) -> None:
        self._probe = probe
        self._width = width
        self._layer = layer
        self._pre, self._middle, self._post = (
            point.value(probe) if not point.why else None for point in (layer.pre, layer.middle, layer.post)
        )

    def find(self) -> dict[str, Side]:
        """Return all sides by their names."""
        layer = self._layer
        found = self._in_turn() if self._middle is not None else self._side_by_side()
        given = {"attn_in": self._given(layer.attention), "mlp_in": self._given(layer.into)}
        return {**given, **found}

    def _events(
        self, children: Iterable[str], after: int = -1
    ) -> list[tuple[Event, Path, torch.Tensor]]:  # [rows, hidden] each
        """Return the outputs of parts of the layer, from a place in the forward on."""
        made = [event for child in children if (event := self._probe.at(child, "output")) and event.index > after]
        made.sort(key=lambda event: event.index)
        return [(event, at, rows) for event in made for at, rows in event.rows(self._width).items()]

    def _ended(self, part: str) -> int | None:
        event = self._probe.at(part, "output") if part else None
        return None if event is None else event.index

    def _given(self, part: str) -> Side:
        event = self._probe.at(part, "input") if part else None
        if event is None:
            return Side(why="this layer has no such part, or it could not be found")
        rows = event.rows(self._width)
        if len(rows) != 1:
            return Side(why=f"{part} is given {len(rows)} tensors of the model's width; read {part}.inputs")
        [(at, tensor)] = rows.items()
        return Side(part, "input", at, shared=self._shared(part, tensor))

    def _shared(self, part: str, tensor: torch.Tensor) -> str:  # [rows, hidden]
        """Return what else of the layer is given a tensor."""
        others = (self._layer.attention, self._layer.into)
        given = [event for other in others if other != part and (event := self._probe.at(other, "input"))]
        if any(torch.equal(tensor, rows) for event in given for rows in event.rows(self._width).values()):
            return "attention and MLP are given the same tensor, so a change would reach both"
        streams = [self._pre, self._middle, self._post]
        if any(stream is not None and torch.equal(tensor, stream) for stream in streams):
            return "it is the stream itself, so a change would reach the stream too"
        return ""

    def _in_turn(self) -> dict[str, Side]:
        """Return what is added before and after the middle of the layer."""
        layer, pre, middle, post = self._layer, self._pre, self._middle, self._post
        begun = self._probe.at(layer.middle.path, layer.middle.kind)
        start, end = self._ended(layer.attention), self._ended(layer.mlp)
        attention = mlp = Side(why=_NOT_SHOWN)
        if start is None or begun is None or pre is None or middle is None:
            return {"attn_out": attention, "mlp_out": mlp}
        for event, at, rows in self._events(layer.children, start - 1):
            factor = multiple(middle, rows, pre) if event.index < begun.index else None
            if factor is not None:
                attention = Side(event.path, "output", at, factor)
                break
        if end is None or post is None:
            return {"attn_out": attention, "mlp_out": mlp}
        for event, at, rows in self._events(layer.children, end - 1):
            factor = multiple(post, rows, middle)
            if factor is None and self._adds_first(event, middle, rows):
                factor = 1.0
            if factor is not None:
                mlp = Side(event.path, "output", at, factor)
                break
        return {"attn_out": attention, "mlp_out": mlp}

    def _adds_first(self, event: Event, middle: torch.Tensor, rows: torch.Tensor) -> bool:  # [rows, hidden] each
        """Return whether an output is added first, and the sum is scaled or added to."""
        post, total = self._post, middle + rows
        assert post is not None
        if multiple(post, total) is not None:
            return True
        later = [begun for begun in self._probe.after(event.index, "input") if begun.path in self._layer.children]
        goes_on = any(same(one, total, middle, rows) for begun in later for one in begun.rows(self._width).values())
        return goes_on and any(
            weights(post, [total, further]) is not None
            for _, _, further in self._events(self._layer.children, event.index)
        )

    def _side_by_side(self) -> dict[str, Side]:
        """Return what is added in a layer without a middle, by both parts or by the only one."""
        layer, pre, post = self._layer, self._pre, self._post
        attention = mlp = Side(why=_NOT_SHOWN)
        start, end = self._ended(layer.attention), self._ended(layer.mlp)
        if pre is None or post is None:
            return {"attn_out": attention, "mlp_out": mlp}
        ones = self._events(layer.children, start - 1) if start is not None else []
        others = self._events(layer.children, end - 1) if end is not None else []
        if start is None or end is None:
            for event, at, rows in [*ones, *others]:
                factor = multiple(post, rows, pre)
                if factor is not None:
                    side = Side(event.path, "output", at, factor)
                    return {"attn_out": side if ones else attention, "mlp_out": side if others else mlp}
            return {"attn_out": attention, "mlp_out": mlp}
        of_attention = [one for one in ones if one[0].path == layer.attention]
        of_mlp = [one for one in others if one[0].path == layer.mlp]
        for a, at, added in of_attention:
            for m, where, further in of_mlp:
                if same(post, pre + added + further, pre, added, further):
                    attention, mlp = Side(a.path, "output", at), Side(m.path, "output", where)
        return {"attn_out": attention, "mlp_out": mlp}


def view_of(
    tree: ModuleTree, node: Node, name: str, side: Side, width: int, numbers: Sequence[float]
) -> View:  # width: of the stream
    """Return the view of a side.

    Args:
        tree: the modules.
        node: the canonical node that has it.
        name: its full name.
        side: the side.
        width: of the stream.
        numbers: one of which is the side's factor.
    """
    factor, why = side.factor, side.why
    if not why and factor != 1:
        found = [one for one in numbers if abs(one - factor) <= 1e-3 * abs(factor)]
        if not found:
            why = f"the layer adds about {factor:.4g} times {side.path}.{side.kind}, by a number that is not known exactly"
        factor = found[0] if found else factor
    if not why and isinstance(layout := tree.nodes[side.path].layouts.of(side.kind, side.at), Unknown):
        why = layout.why
    if why:
        return Unreachable(name, node.path, node, "output", "", why=why)
    raw, shape = tree.nodes[side.path], f"[tokens, {width}]"
    if side.shared:
        instead = "attn.q, attn.k, attn.v or attn_out" if name.endswith("attn_in") else "the parts of mlp, or mlp_out"
        shared = f"{side.shared}; change {instead}, or clone it to work on it"
        return Shared(name, node.path, raw, side.kind, shape, at=side.at, why=shared)
    if factor != 1:
        return Scaled(name, node.path, raw, side.kind, shape, at=side.at, factor=factor)
    return Part(name, node.path, raw, side.kind, shape, at=side.at)


def check_sides(
    tree: ModuleTree, found: Sequence[tuple[Node, Layer, dict[str, Side]]], width: int, run: Callable[[], object]
) -> None:
    """Check what parts of layers add with a further dummy forward, in which it is changed.

    A part's output whose change does not reach the stream is refused.

    Args:
        tree: the modules.
        found: the sides of each layer, with the layer's node.
        width: of the stream.
        run: runs a dummy forward.
    """
    added = [side for _, _, sides in found for side in sides.values() if side.kind == "output" and not side.why]
    changed = record(tree.paths, run, _change_of(added))
    for node, layer, sides in found:
        now = SideFinder(changed, width, layer).find()
        for attribute, side in sides.items():
            again = now[attribute]
            alike = (side.path, side.kind, side.at) == (again.path, again.kind, again.at)
            if side in added and not (alike and abs(side.factor - again.factor) <= 1e-3 * abs(side.factor)):
                why = f"a change of {side.path}.output does not reach the stream"
                name = node.views[attribute].name
                node.views[attribute] = Unreachable(name, node.path, node, "output", "", why=why)


def _change_of(sides: Iterable[Side]) -> Callable[[str, str, Any], None]:
    """Return a change of a probe run, which adds to each of some tensors in place."""
    chosen = list(sides)

    def change(path: str, kind: str, value: Any) -> None:
        for side in chosen:
            if (side.path, side.kind) == (path, kind):
                tensor = value
                for key in side.at:
                    tensor = tensor[key]
                tensor += torch.linspace(-1, 1, tensor.shape[-1], device=tensor.device, dtype=tensor.dtype)

    return change
