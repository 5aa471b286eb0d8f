"""Finds the forms of a model's values, and the sites of taps, in one pass of the model.

Over several ranks a tensor is a site where every rank holds all of it. The pass has to show that. So attention, which gives
nothing in a pass without requests, gives numbers there that differ from rank to rank: a tensor that is equal on all ranks all the
same is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from executor.graphs.taps import Site, with_replacing
from executor.model.items import Path
from executor.model.layouts import Replicated
from executor.model.rows import Rows
from executor.model.tree import LOGITS, PSEUDO, SAMPLES, ModuleTree
from executor.plan.forms import Form
from executor.views.probe import differing

Forms = dict[tuple[str, str], Form]


@dataclass(frozen=True)
class Observed:
    """What one pass has shown.

    Attributes:
        forms: of the locations' values, whole over the ranks, by path and kind.
        several: whether there are several ranks.
        spread: the tensors of which a rank holds a part, by path, kind, and the path in the value.
    """

    forms: Forms = field(default_factory=dict)
    several: bool = False
    spread: set[tuple[str, str, Path]] = field(default_factory=set)

    def is_spread(self, path: str, kind: str, at: Path) -> bool:
        """Return whether a rank holds a part of a tensor of a location, as far as is known.

        Every rank has all logits and samples.
        """
        return (
            self.several and path not in PSEUDO and ((path, kind) not in self.forms or (path, kind, at) in self.spread)
        )


class _NotShown(Exception):
    """Whether every rank holds a value is not known."""


def observe(tree: ModuleTree, run: Callable[[], object]) -> Observed:
    """Run a forward of one row; return the form of each location's value.

    All ranks do this at the same time. A location that the forward does not come to, or comes to with another number of rows, has
    none. Over several ranks a location has none either if the pass does not show which part of it each rank holds.
    """
    several = any(node.layouts.sharded for node in tree.nodes.values())
    observed = Observed(several=several)
    row = Rows(0, 1, 1, 1)

    def note(path: str, kind: str, value: Any) -> None:
        if (path, kind) in observed.forms:
            return
        spread: set[tuple[str, str, Path]] = set()

        def over_ranks(tensor: torch.Tensor, at: Path) -> torch.Tensor:  # [1, ..., part] -> [1, ..., features]
            layout = tree.nodes[path].layouts.of(kind, at)
            if isinstance(layout, Replicated):
                if tensor.dim() > 1 and not layout.shown(tensor):
                    raise _NotShown
                return tensor
            try:
                gathered = layout.gather(tensor)
            except Exception as error:  # the same on every rank
                raise _NotShown from error
            if gathered is not tensor:
                spread.add((path, kind, at))
            return gathered

        try:
            form = Form.of(value, row, over_ranks)
        except _NotShown:
            return
        if form.rows == 1:
            observed.forms[path, kind] = form
            observed.spread.update(spread)

    handles = []
    if several:
        handles += differing(node.module for node in tree.nodes.values() if node.module is not None)
    for path, node in tree.nodes.items():
        module = node.module
        if module is None:
            continue
        handles.append(module.register_forward_pre_hook(_before(note, path), with_kwargs=True))
        handles.append(module.register_forward_hook(_after(note, path)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return observed


@torch.inference_mode()
def outside_of(model: Any, hidden: Any, sampled: torch.dtype) -> Forms:
    """Return the forms of the logits and the samples.

    Args:
        model: the engine's model.
        hidden: what it gives for a row, [1 or more, hidden].
        sampled: the dtype of sampled tokens.
    """
    if not isinstance(hidden, torch.Tensor):
        return {}
    values = {LOGITS: model.compute_logits(hidden[:1]), SAMPLES: torch.zeros(1, 1, dtype=sampled, device=hidden.device)}
    row = Rows(0, 1, 1, 1)
    forms = {
        (path, "output"): Form.of(value, row, lambda tensor, _: tensor)
        for path, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return {key: form for key, form in forms.items() if form.rows == 1}


def _before(note: Callable[[str, str, Any], None], path: str) -> Callable[..., None]:
    return lambda _module, args, kwargs: note(path, "input", (args, kwargs))


def _after(note: Callable[[str, str, Any], None], path: str) -> Callable[..., None]:
    return lambda _module, _args, output: note(path, "output", output)


def sites_of(observed: Observed, dtype: torch.dtype) -> list[Site]:
    """Return the sites of a model, in the order in which the forward comes to them.

    Every tensor [rows, columns] of the model's dtype is a site if each rank holds all of it. So are two such tensors that lie
    side by side in a location's value: a residual pair.

    Args:
        observed: the locations' values.
        dtype: of the model.
    """
    found: list[Site] = []
    for (path, kind), form in observed.forms.items():
        if path in PSEUDO:  # outside of the pass
            continue
        leaves = [
            (leaf, at)
            for leaf, at in form.leaves()
            if len(leaf.shape) == 1 and leaf.dtype == dtype and (path, kind, at) not in observed.spread
        ]
        found += [Site(path, kind, (at,), leaf.shape[0]) for leaf, at in leaves]
        found += [
            Site(path, kind, (first_at, second_at), first.shape[0])
            for (first, first_at), (second, second_at) in pairwise(leaves)
            if first.shape == second.shape and first_at[:-1] == second_at[:-1]
        ]
    return with_replacing(found)
