"""What a change of a canonical value does, compared with the same change in transformers.

Every value of a layer is changed at the same time, each in a trace of its own, with plain requests beside them: a change that
reached another request, or that one rank wrote into the wrong part, would show in the logits.
"""

from __future__ import annotations

import re

import torch

from tests.engine.harness import Block, LocalEngine
from tests.fidelity.places import Place
from tests.oracle import Edit, Oracle, difference

PROMPT = [12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19]
BESIDE = [[5, 9, 301, 77], [3]]
SOURCE = """\
logits = []
for step in tracer.iter[:]:
    value = {at}
    {at} = value * 0.5 + torch.linspace(-0.5, 0.5, value[0].numel()).reshape(value.shape[1:])
    logits.append(model.logits.output)
logits.save()
"""
# row → phase → error of the logits, or refusal
Changes = dict[str, dict[str, float | str]]
EFFECT = 1e-3  # of a change on the logits, or there is nothing to compare


def ramp(value: torch.Tensor) -> torch.Tensor:
    """The change: another one in each column and head."""
    return value * 0.5 + torch.linspace(-0.5, 0.5, value[0].numel()).reshape(value.shape[1:])


def changed(engine: LocalEngine, places: list[Place], oracle: Oracle | None, phases: tuple[str, ...]) -> Changes:
    """Return for each canonical value how far the logits after its change are off, by phase, or how a change is refused.

    Args:
        engine: runs the traces.
        places: all of the model's; of those in layers, the second layer's are changed.
        oracle: the truth; None in a process that is not told the values.
        phases: the steps.
    """
    places = [place for place in places if place.canonical and not (place.truth and "blocks[0]" in place.source)]
    sampling = {"max_tokens": len(phases), "ignore_eos": True}
    alone = [engine.plain(prompt).token_ids for prompt in BESIDE]
    blocks = [[Block(PROMPT, SOURCE.format(at=place.source), sampling)] for place in places]
    rans = engine.run_traces(blocks, plain=tuple(BESIDE))
    assert [ran.token_ids for ran in rans[len(places) :]] == alone, "a change reached another request"
    found: Changes = {}
    if oracle is None:
        return found
    untouched = oracle.run(PROMPT, 1)
    for place, ran in zip(places, rans, strict=False):
        if ran.failure is not None:
            found[place.row] = dict.fromkeys(phases, re.sub(r"blocks\[\d+\]", "blocks[i]", ran.failure.message))
            continue
        path = "logits" if place.row == "unembed.output" else place.row.replace("[i]", ".1")
        truth = oracle.run(PROMPT, len(phases), [Edit(path, "output", ramp)], canonical=True)
        assert difference(truth.logits[0], untouched.logits[0]) > EFFECT, f"a change of {path} has no effect to compare"
        assert ran.token_ids == truth.tokens, path
        found[place.row] = {
            phase: difference(ran.saved["logits"][step], truth.logits[step]) for step, phase in enumerate(phases)
        }
    return found
