"""A recorded dummy forward: every module's input and output, from which views are found.

The dummy step computes no attention, because there is nothing to attend to. So the outputs of attention kernels are filled with
noise. Everything else is the model's own arithmetic on its own weights. A relation between recorded tensors (one is the sum of
two others, or the left half of another) holds because the model computes them so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase

from executor.model.items import Path


@dataclass(frozen=True)
class Event:
    """The begin or the end of a module in a forward.

    `value` is the module's `(args, kwargs)` at its begin, and what the module returned at its end.

    Attributes:
        tensors: copies of the tensors in the value, as they were then, by their path of keys.
    """

    index: int
    path: str
    kind: str
    value: Any
    tensors: dict[Path, torch.Tensor]

    def rows(self, width: int) -> dict[Path, torch.Tensor]:
        """Return the recorded tensors that are floating-point rows, [tokens, width]."""
        return {
            path: tensor
            for path, tensor in self.tensors.items()
            if tensor.is_floating_point() and tensor.dim() == 2 and tensor.shape[1] == width
        }


class ProbeRun:
    """The events of one forward that probes the model."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self._first = {(event.path, event.kind): event for event in reversed(events)}

    def at(self, path: str, kind: str) -> Event | None:
        """Return the first event of a module: its begin ("input") or its end ("output")."""
        return self._first.get((path, kind))

    def after(self, index: int, kind: str) -> Iterator[Event]:
        """Iterate over later events of a kind."""
        return (event for event in self.events[index + 1 :] if event.kind == kind)


def record(
    paths: dict[torch.nn.Module, str],
    run: Callable[[], object],
    change: Callable[[str, str, Any], None] = lambda path, kind, value: None,
) -> ProbeRun:
    """Run a dummy forward and record it.

    Args:
        paths: the model's modules and their paths.
        run: runs the forward.
        change: called for every module with the path, "input" and `(args, kwargs)` before the module runs, and with "output"
            and the returned value afterwards; not for modules inside of a state-space mixer. It may change the tensors in
            place; the run has the changed tensors.
    """
    events: list[Event] = []
    noise = torch.Generator().manual_seed(0)
    mixers = tuple(f"{path}." for module, path in paths.items() if isinstance(module, MambaBase))

    def note(path: str, kind: str, value: Any) -> None:
        tensors = {at: tensor.detach().clone() for at, tensor in _tensors(value, ())}
        events.append(Event(len(events), path, kind, value, tensors))

    def before(path: str, args: Any, kwargs: Any) -> None:
        change(path, "input", (args, kwargs))
        note(path, "input", (args, kwargs))

    def after(module: torch.nn.Module, path: str, output: Any) -> None:
        if isinstance(module, AttentionLayerBase) and isinstance(output, torch.Tensor):
            output.copy_(torch.randn(output.shape, generator=noise).to(output.device, output.dtype))
        change(path, "output", output)
        note(path, "output", output)

    handles: list[Any] = []
    try:
        for module, path in paths.items():
            if path.startswith(mixers):  # they work on memory that no kernel wrote
                continue
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, path=path: before(path, args, kwargs), with_kwargs=True
                )
            )
            handles.append(
                module.register_forward_hook(lambda module, _, output, path=path: after(module, path, output))
            )
        run()
    finally:
        for handle in handles:
            handle.remove()
    return ProbeRun(events)


def differing(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Have attention give random numbers, other numbers on each rank.

    Without requests it gives zeros. With these numbers, what is equal on all ranks afterwards is a sum over the ranks. The
    returned handles end this when they are removed.
    """
    noise = torch.Generator().manual_seed(get_tp_group().rank_in_group)

    def after(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return None
        return torch.randn(output.shape, generator=noise).to(output.device, output.dtype)

    return [one.register_forward_hook(after) for one in modules if isinstance(one, AttentionLayerBase)]


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:  # any shape
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _tensors(item, (*path, i))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _tensors(item, (*path, name))


def same(a: torch.Tensor, b: torch.Tensor, *terms: torch.Tensor) -> bool:  # any shape
    """Return whether two recorded tensors agree in every element, up to rounding.

    Args:
        a, b: tensors of one shape.
        terms: the terms of the sum, if one of the tensors is a sum. The rounding error grows with their size.
    """
    if a.shape != b.shape or a.numel() == 0:
        return False
    size = b.double().abs()
    for term in terms:
        size = size + term.double().abs()
    rounding = 8 * max(torch.finfo(one.dtype).eps for one in (a, b))
    return bool(((a.double() - b.double()).abs() <= rounding * size).all())


def multiple(a: torch.Tensor, b: torch.Tensor, base: torch.Tensor | None = None) -> float | None:  # any shape
    """Return the nonzero factor f with a = base + f * b, or None if there is none.

    Without a base, a = f * b.
    """
    if a.shape != b.shape:
        return None
    x, y = (a.double() if base is None else a.double() - base.double()), b.double()
    weight = _certainty([a, b] if base is None else [a, b, base])
    norm = float((y * weight).square().sum())
    factor = float((x * y * weight.square()).sum()) / norm if norm > 0 else 0.0
    if not math.isfinite(factor) or not factor:
        return None
    if abs(factor - 1) < 0.01:  # The factor is estimated from rounded numbers.
        factor = 1.0
    made = y * factor if base is None else y * factor + base.double()
    terms = [] if base is None else [y * factor, base]
    return factor if same(a, made.to(a.dtype), *terms) else None


def combined(total: torch.Tensor, base: torch.Tensor, terms: Sequence[torch.Tensor]) -> bool:  # any shape
    """Return whether a tensor is a nonzero multiple of a base, plus multiples of terms."""
    found = weights(total, [base, *terms])
    return found is not None and abs(found[0]) >= 1e-3


def weights(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[float] | None:  # any shape
    """Return the factors of others in a tensor that is a sum of their multiples.

    The result is None if the tensor is no such sum."""
    if any(part.shape != total.shape for part in parts):
        return None
    weight = _certainty([total, *parts])
    columns = torch.stack([(part.double() * weight).flatten() for part in parts], dim=-1)
    weighted = (total.double() * weight).flatten().unsqueeze(-1)
    factors: list[float] = torch.linalg.lstsq(columns.cpu(), weighted.cpu()).solution.flatten().tolist()
    if not all(map(math.isfinite, factors)):
        return None
    scaled = [part.double() * factor for part, factor in zip(parts, factors, strict=True)]
    return factors if same(total, torch.stack(scaled).sum(0).to(total.dtype), *scaled) else None


def _certainty(parts: Sequence[torch.Tensor]) -> torch.Tensor:  # any shape; returns float64
    """Return how certain each element of a sum is: 1 over the size of its parts.

    The rounding error grows with that size. Trained models have a few columns that are thousands of times as large as the others.
    Their rounding errors are as large as other elements are, and would decide what the factors seem to be.
    """
    size = torch.stack([part.double().abs() for part in parts]).sum(0)
    return torch.where(size > 0, 1 / size, 0.0)
