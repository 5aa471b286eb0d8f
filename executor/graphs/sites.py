"""Finds the forms of a model's values, and the sites of taps, in one pass of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from executor.graphs.taps import Site, with_replacing
from executor.model.rows import Rows
from executor.model.tree import LOGITS, PSEUDO, SAMPLES, ModuleTree
from executor.plan.forms import Form

Forms = dict[tuple[str, str], Form]


def observe(tree: ModuleTree, run: Callable[[], object]) -> Forms:
    """Run a forward of one row; return the form of each location's value, by path and kind.

    A location that the forward does not come to, or comes to with another number of rows, has none.
    """
    forms: Forms = {}
    row = Rows(0, 1, 1, 1)

    def note(path: str, kind: str, value: Any) -> None:
        form = Form.of(value, row, lambda tensor, _: tensor)
        if form.rows == 1:
            forms.setdefault((path, kind), form)

    handles = []
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
    return forms


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


def sites_of(forms: Mapping[tuple[str, str], Form], dtype: torch.dtype) -> list[Site]:
    """Return the sites of a model, in the order in which the forward comes to them.

    Every tensor [rows, columns] of the model's dtype is a site, and so are two such tensors that lie side by side in a
    location's value: a residual pair.

    Args:
        forms: of the locations' values, on one rank that has the whole model.
        dtype: of the model.
    """
    found: list[Site] = []
    for (path, kind), form in forms.items():
        if path in PSEUDO:  # outside of the pass
            continue
        leaves = [(leaf, at) for leaf, at in form.leaves() if len(leaf.shape) == 1 and leaf.dtype == dtype]
        found += [Site(path, kind, (at,), leaf.shape[0]) for leaf, at in leaves]
        found += [
            Site(path, kind, (first_at, second_at), first.shape[0])
            for (first, first_at), (second, second_at) in pairwise(leaves)
            if first.shape == second.shape and first_at[:-1] == second_at[:-1]
        ]
    return with_replacing(found)
