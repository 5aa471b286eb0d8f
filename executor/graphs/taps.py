"""The sites of a model, and hooks that run their taps between the modules.

The hooks stay for as long as a graph is captured, or an eager step runs. A replay calls no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from executor.graphs import reference
from executor.graphs.tables import Tables
from executor.model.items import Path
from executor.plan.run import replaced
from executor.views.view import tensor_at


@dataclass(frozen=True)
class Site:
    """A tensor at a raw location, or a residual pair.

    Attributes:
        path: the module.
        kind: "input" or "output".
        at: where the tensors are in the location's value: one, or the two of a pair. The second may be None at run time.
        width: the number of columns on this rank.
        replaces: whether a copy takes the tensor's place before the taps run, as when a block assigns the value. Other parts of
            the model that hold the tensor do not see what the taps do then.
    """

    path: str
    kind: str
    at: tuple[Path, ...]
    width: int
    replaces: bool = False

    @property
    def key(self) -> tuple[str, str, tuple[Path, ...]] | tuple[str, str, tuple[Path, ...], bool]:
        """What `executor.graphs.lower` finds the site by."""
        plain = (self.path, self.kind, self.at)
        return (*plain, True) if self.replaces else plain


class RunTaps(Protocol):
    """Runs the taps of a site on the rows of a step."""

    def __call__(self, tables: Tables, site: int, first: torch.Tensor, second: torch.Tensor | None = None) -> None:
        """Run them; the tensors are [rows, columns], changed in place."""


def run_taps_on(device: torch.device) -> RunTaps:
    """Return what runs taps on a device: the kernel on CUDA, the reference elsewhere."""
    if device.type == "cuda":
        from executor.graphs import kernel

        return kernel.run_taps
    return reference.run_taps


class Taps:
    """The sites of one worker's model.

    Args:
        modules: the model's modules by path.
        sites: in the order of the model. A site of one tensor stands before a site of a pair with that tensor, and both stand
            before a site that replaces the tensor.
        tables: their tables.
    """

    def __init__(self, modules: Mapping[str, nn.Module], sites: Sequence[Site], tables: Tables) -> None:
        if tuple(site.width for site in sites) != tables.widths:
            raise ValueError("the tables are of other sites")
        self._modules = modules
        self.sites = tuple(sites)
        self._tables = tables
        self._run = run_taps_on(tables.output.device)
        self._numbers = {site: number for number, site in enumerate(self.sites)}

    def number(self, site: Site) -> int | None:
        """Return the number of a site; None if the model has no such site."""
        return self._numbers.get(site)

    @contextmanager
    def hooked(self, numbers: Iterable[int]) -> Iterator[None]:
        """Return a context in which the model runs the taps of some sites."""
        hooked: dict[tuple[str, str], list[int]] = {}
        for number in sorted(numbers):
            site = self.sites[number]
            hooked.setdefault((site.path, site.kind), []).append(number)
        handles = []
        try:
            for (path, kind), mine in hooked.items():
                module, visit = self._modules[path], self._visit(mine)
                if kind == "input":
                    handles.append(module.register_forward_pre_hook(_before(visit), with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(_after(visit)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _visit(self, numbers: list[int]) -> Callable[[Any], Any]:
        def visit(value: Any) -> Any:
            given = value
            for number in numbers:
                site = self.sites[number]
                if site.replaces:
                    value = replaced(value, site.at[0], tensor_at(value, site.at[0]).clone())
                found = [tensor_at(value, path) for path in site.at]
                tensors = [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
                self._run(self._tables, number, *tensors)
            return None if value is given else value

        return visit


def with_replacing(sites: Sequence[Site]) -> list[Site]:
    """Return some sites, and after all of them the sites that replace their tensors.

    A site of a pair has no such site: a block changes the sum of a pair in place.
    """
    return [*sites, *(replace(site, replaces=True) for site in sites if len(site.at) == 1)]


def _before(visit: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda _module, args, kwargs: visit((args, kwargs))


def _after(visit: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda _module, _args, output: visit(output)
