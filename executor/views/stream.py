"""Finds the residual stream at a layer's input, middle and output.

Engines fuse each addition to the stream with the norm that follows. So some layers pass two tensors whose sum is the stream;
other layers pass one tensor. A recorded forward shows which it is, and where the stream lies between a layer's halves:

- A pair counts as a sum only if a later module gets both tensors and computes their sum.
- One tensor of a pair counts as the stream only if nothing changes when the other is overwritten (`executor.views.stale`).
- A point counts as the middle of a layer only if its value is the layer's own input plus the output of the attention, and the
    layer's result is that value plus the outputs of later parts of the layer. This must also hold after the value was changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import torch

from executor.model.items import Path
from executor.views.probe import Event, ProbeRun, combined, multiple, same
from executor.views.stale import Spot


@dataclass(frozen=True)
class Point:
    """Where the stream is: the tensors at a module's input or output whose sum is the stream.

    If the stream cannot be found, the point says why.

    Attributes:
        path, kind: the module and which of its locations.
        at: where the tensors are in the location's value.
        why: the reason, if there is no point.
    """

    path: str = ""
    kind: str = ""
    at: tuple[Path, ...] = ()
    why: str = ""

    def value(self, probe: ProbeRun) -> torch.Tensor | None:
        """Return the stream at this point of a probe run, [tokens, width]."""
        event = probe.at(self.path, self.kind)
        return None if event is None else _sum([event.tensors[path] for path in self.at if path in event.tensors])


def _sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:  # [rows, hidden]
    total: torch.Tensor | None = None
    for tensor in tensors:
        total = tensor if total is None else total + tensor
    return total


class StreamFinder:
    """Finds the points of the stream in a probe run.

    Args:
        probe: the run to look at.
        width: the width of the stream.
        unused: tensors of layers' inputs and outputs that the model does not use.
    """

    def __init__(self, probe: ProbeRun, width: int, unused: frozenset[Spot] = frozenset()) -> None:
        self._probe = probe
        self._width = width
        self._unused = unused

    def of(self, probe: ProbeRun) -> StreamFinder:
        """Return the finder of another probe run of the same model."""
        return StreamFinder(probe, self._width, self._unused)

    def unsummed(self, layers: Iterable[str]) -> list[Event]:
        """Return the layers' inputs and outputs with two tensors whose sum no module computes."""
        found = [event for layer in layers for kind in ("input", "output") if (event := self._probe.at(layer, kind))]
        pairs = [(event, list(event.rows(self._width).values())) for event in found]
        return [event for event, pair in pairs if len(pair) == 2 and not self._added_later(event, pair)]

    def used(self, layer: str, event: Event) -> dict[Path, torch.Tensor]:
        """Return an event's rows, [tokens, width], without the tensors that the model does not use."""
        ended = self._probe.at(layer, "output")
        unused = [ended.tensors[at] for path, kind, at in self._unused if ended and (path, kind) == (layer, "output")]
        return {
            at: tensor
            for at, tensor in event.rows(self._width).items()
            if not any(torch.equal(tensor, other) for other in unused)
        }

    def boundary(self, path: str, kind: str) -> Point:
        """Return the stream at a layer's input or output."""
        event = self._probe.at(path, kind)
        if event is None:
            return Point(why="the forward pass does not call this layer")
        rows = {at: rows for at, rows in event.rows(self._width).items() if (path, kind, at) not in self._unused}
        if len(rows) == 1:
            return Point(path, kind, tuple(rows))
        if len(rows) == 2 and self._added_later(event, list(rows.values())):
            return Point(path, kind, tuple(rows))
        return Point(
            why=f"the layer's {kind} has {len(rows)} tensors of the model's width. Which of them, or which sum of them, the "
            "model goes on with could not be established, so none is known to be the stream; read what the modules in the "
            "layer are given and return"
        )

    def _added_later(self, event: Event, pair: list[torch.Tensor]) -> bool:  # [rows, hidden]
        """Return whether a later module gets both tensors and returns their sum."""
        for begun in self._probe.after(event.index, "input"):
            given = list(begun.rows(self._width).values())
            taken = len(given) == 2 and all(any(torch.equal(one, other) for other in given) for one in pair)
            if taken and self._gives_sum(begun.path, pair):
                return True
        return False

    def middle(self, layer: str, children: list[str], attention: str, post: Point) -> Point:
        """Return the stream between a layer's attention and the parts that follow it.

        Args:
            layer: the layer's path.
            children: the paths of the layer's parts.
            attention: the path of the part that holds the attention.
            post: the stream at the layer's output.
        """
        probe = self._probe
        ended = probe.at(attention, "output")
        result = post.value(probe)
        if ended is None or result is None:
            return Point(why=post.why or f"the forward pass does not call {attention}")
        for child in children:
            point = self._candidate(probe.at(child, "input"), ended.index)
            if point is None or not self._follows(point, layer, children, ended):
                continue
            if self.completes(point, children, post, probe):
                return point
        return Point(why=self._no_middle(layer, children, ended, result))

    def _candidate(self, event: Event | None, after: int) -> Point | None:
        if event is None or event.index < after:
            return None
        rows = event.rows(self._width)
        if len(rows) == 1:
            return Point(event.path, "input", tuple(rows))
        if len(rows) == 2 and self._gives_sum(event.path, list(rows.values())):
            return Point(event.path, "input", tuple(rows))
        return None

    def _gives_sum(self, path: str, pair: list[torch.Tensor]) -> bool:  # [rows, hidden]
        ended = self._probe.at(path, "output")
        return ended is not None and any(
            same(one, pair[0] + pair[1], *pair) for one in ended.rows(self._width).values()
        )

    def _follows(self, point: Point, layer: str, children: list[str], attention: Event) -> bool:
        """Return whether a point's stream is the layer's input plus the attention's output.

        The attention's output may be scaled, or be the output of a norm after the attention.
        """
        probe = self._probe
        begun, stream, pre = probe.at(point.path, "input"), point.value(probe), self.boundary(layer, "input")
        before = pre.value(probe)
        if begun is None or stream is None or before is None:
            return False
        made = [event for child in children if (event := probe.at(child, "output"))]
        return any(
            multiple(stream, given, before) is not None
            for event in made
            if attention.index <= event.index < begun.index
            for given in event.rows(self._width).values()
        )

    def completes(self, point: Point, children: list[str], post: Point, probe: ProbeRun) -> bool:
        """Return whether a layer's result is the stream at a point plus the outputs of later parts.

        There are one or two such parts, each scaled or not.
        """
        begun, stream, result = probe.at(point.path, "input"), point.value(probe), post.value(probe)
        if begun is None or stream is None or result is None:
            return False
        made = [event for child in children if (event := probe.at(child, "output")) and event.index > begun.index]
        given = [rows for event in made for rows in event.rows(self._width).values()]
        return any(multiple(result, one, stream) is not None for one in given) or any(
            combined(result, stream, terms) for count in (1, 2) for terms in combinations(given, count)
        )

    def _no_middle(
        self, layer: str, children: list[str], attention: Event, result: torch.Tensor
    ) -> str:  # [rows, hidden]
        """Return why a layer has no middle.

        In a parallel layer no module gets the stream with the attention's result.
        """
        pre = self.boundary(layer, "input").value(self._probe)
        gives, takes, given = [], [], []
        for child in children:
            begun, ended = self._probe.at(child, "input"), self._probe.at(child, "output")
            if child != attention.path and begun is not None and ended is not None:
                given += list(begun.rows(self._width).values()) if begun.index > attention.index else []
                takes += [*begun.rows(self._width).values(), *ended.rows(self._width).values()]
                gives += list(ended.rows(self._width).values())
        mine = list(attention.rows(self._width).values())
        begun = self._probe.at(attention.path, "input")
        alike = begun is not None and any(
            torch.equal(one, other) for one in begun.rows(self._width).values() for other in given
        )
        summed = pre is not None and any(
            same(result, pre + one + other, pre, one, other) for one in mine for other in gives
        )
        if pre is not None and any(multiple(result, one, pre) is not None for one in mine):
            return "this layer has no MLP, so the stream has no middle here; use resid_pre and resid_post"
        apart = pre is not None and not any(same(one, pre + other, pre, other) for one in takes for other in mine)
        if alike or (summed and apart):
            return (
                "this architecture runs attention and MLP in parallel, so there is no stream between them; use resid_pre "
                "and resid_post"
            )
        return "where the stream lies between this layer's attention and its MLP could not be established"
