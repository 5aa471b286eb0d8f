"""Finds tensors of a layer's input or output that the model does not use.

Some layers return the stream and, beside it, the stream before the layer's last addition. The next layer drops the second
tensor, so the sum of the two is no value of the model.

A tensor counts as unused only if a dummy forward in which it is overwritten computes everything else as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from executor.model.items import Path
from executor.views.joining import events_of, probe_of
from executor.views.probe import Event, ProbeRun, record

# A tensor of a module's input or output: the module's path, "input" or "output", and the keys into the value.
Spot = tuple[str, str, Path]


def find_unused(
    paths: dict[torch.nn.Module, str],
    run: Callable[[], object],
    gather: Callable[[Any], list[Any]],
    probe: ProbeRun,
    pairs: list[Event],
    width: int,
) -> frozenset[Spot]:
    """Return the tensors of pairs that the model does not use.

    Of all pairs it is the same half, or no tensor at all.

    Args:
        paths: the modules of this pipeline stage and their paths.
        run: runs a dummy forward, on all stages together.
        gather: sends a value to all stages and returns the value of each.
        probe: a probe run of all stages, with nothing changed.
        pairs: inputs and outputs of layers that have two tensors of the model's width, whose sum no module computes.
        width: the model's width.
    """
    for half in (1, 0) if pairs else ():
        spots = frozenset((event.path, event.kind, list(event.rows(width))[half]) for event in pairs)
        change = _Overwrite(spots)
        changed = probe_of(gather(events_of(record(paths, run, change))), next(iter(pairs[0].tensors.values())).device)
        if _alike(probe, changed, spots):
            return spots
    return frozenset()


class _Overwrite:
    """Overwrites tensors when the model comes to them."""

    def __init__(self, spots: Iterable[Spot]) -> None:
        self._spots = spots

    def __call__(self, path: str, kind: str, value: Any) -> None:
        for where, which, at in self._spots:
            if (where, which) == (path, kind):
                tensor = value
                for key in at:
                    tensor = tensor[key]
                # The ramp looks like no value of the model, however large the model's numbers are.
                ramp = torch.linspace(1, 2, tensor.shape[-1], device=tensor.device, dtype=tensor.dtype)
                tensor.mul_(-3).add_(ramp)


def _alike(before: ProbeRun, after: ProbeRun, spots: frozenset[Spot]) -> bool:
    """Return whether two forwards computed the same, apart from the overwritten tensors."""
    if len(before.events) != len(after.events):
        return False
    overwritten = [
        event.tensors[at] for event in after.events for at in event.tensors if (event.path, event.kind, at) in spots
    ]
    for one, other in zip(before.events, after.events, strict=True):
        if (one.path, one.kind, one.tensors.keys()) != (other.path, other.kind, other.tensors.keys()):
            return False
        for at, tensor in one.tensors.items():
            now = other.tensors[at]
            if not _near(tensor, now) and not any(torch.equal(now, new) for new in overwritten):
                return False
    return True


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:  # any shape
    """Return whether two tensors are the same up to the rounding of sums over ranks."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    allowed = 8 * torch.finfo(one.dtype).eps * float(one.abs().max())
    return bool(torch.equal(one, other) or float((one.double() - other.double()).abs().max()) <= allowed)
