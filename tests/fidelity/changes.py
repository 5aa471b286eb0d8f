"""What a change of a canonical value does, compared with the same change in transformers.

Every value of a layer is changed at the same time, each in a trace of its own, with plain requests beside them: a change that
reached another request, or that one rank wrote into the wrong part, would show in the logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engine.harness import Block, LocalEngine
from tests.fidelity.places import Place
from tests.oracle import Edit, Oracle, difference, locations

PROMPT = [12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19]
BESIDE = [[5, 9, 301, 77], [3]]
SOURCE = """\
logits = []
for step in tracer.iter[:]:
    value = {at}
    {at} = value * 0.5 + torch.linspace(-0.5, 0.5, value[0].numel(), dtype=value.dtype).reshape(value.shape[1:])
    logits.append(model.logits.output)
logits.save()
"""
# row → phase → error of the logits, or refusal
Changes = dict[str, dict[str, float | str]]
EFFECT = 1e-3  # of a change on the logits, or there is nothing to compare
# For the block; the model never holds them.
COMPUTED = (".attn.pattern", ".mlp.experts", ".mlp.expert_weights", ".mlp.expert_act", ".mlp.expert_out")


def ramp(value: torch.Tensor) -> torch.Tensor:
    """The change: another one in each column and head."""
    added = torch.linspace(-0.5, 0.5, value[0].numel(), dtype=value.dtype, device=value.device)
    return value * 0.5 + added.reshape(value.shape[1:])


@dataclass(frozen=True)
class Changed:
    """What transformers computed with one change: a token and its logits for each step."""

    tokens: list[int]
    logits: list[torch.Tensor]


def truth_of(oracle: Oracle, checkpoint: Path, steps: int) -> dict[str, Changed]:
    """Return what each change does in transformers, by the oracle's name of the value."""
    untouched = oracle.run(PROMPT, 1).logits[0]
    found = {}
    paths = list(dict.fromkeys(at.path for at in locations(checkpoint, canonical=True)))
    chosen = once(paths)
    for path in paths:
        if path.endswith(COMPUTED) or path not in chosen:
            continue
        truth = oracle.run(PROMPT, steps, [Edit(path, "output", ramp)], canonical=True)
        assert difference(truth.logits[0], untouched) > EFFECT, f"a change of {path} has no effect to compare"
        found[path] = Changed(truth.tokens, truth.logits)
    return found


def once(paths: Iterable[str]) -> set[str]:
    """Return each canonical value once: the second layer's, or the last layer's that has it if the second has none."""
    chosen: dict[str, str] = {}
    for path in paths:
        name = re.sub(r"^blocks\.\d+\.", "", path)
        if not chosen.get(name, "").startswith("blocks.1."):
            chosen[name] = path
    return set(chosen.values())


def changeable(places: list[Place]) -> list[Place]:
    """Return the canonical values that are changed, each in one layer; of refused values all."""
    chosen = once(place.path for place in places if place.canonical and place.truth)
    return [place for place in places if place.canonical and (not place.truth or place.path in chosen)]


def changed(
    engine: LocalEngine,
    places: list[Place],
    truth: dict[str, Changed] | None,
    phases: tuple[str, ...],
    off: Callable[[Any, Any], float] = difference,
) -> Changes:
    """Return for each canonical value how far the logits after its change are off, by phase, or how a change is refused.

    Args:
        engine: runs the traces.
        places: all of the model's; of those in layers, each is changed in one.
        truth: of `truth_of`; None in a process that is not told the values.
        phases: the steps.
        off: how far off logits are, given them and the truth.
    """
    places = changeable(places)
    sampling = {"max_tokens": len(phases), "ignore_eos": True}
    alone = [engine.plain(prompt).token_ids for prompt in BESIDE]
    blocks = [[Block(PROMPT, SOURCE.format(at=place.source), sampling)] for place in places]
    rans = engine.run_traces(blocks, plain=tuple(BESIDE))
    assert [ran.token_ids for ran in rans[len(places) :]] == alone, "a change reached another request"
    found: Changes = {}
    if truth is None:
        return found
    for place, ran in zip(places, rans, strict=False):
        if ran.failure is not None:
            found[place.row] = dict.fromkeys(phases, place.generally(ran.failure.message))
            continue
        path = place.path
        assert ran.token_ids == truth[path].tokens, path
        found[place.row] = {
            phase: off(ran.saved["logits"][step], truth[path].logits[step]) for step, phase in enumerate(phases)
        }
    return found
