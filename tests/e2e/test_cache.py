"""`tracer.cache()`, `model.scan` and `model.explain` over two tensor-parallel ranks: whole values and shapes of every module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import interpose
from tests.oracle import Oracle, difference, locations

PROMPT = [5, 400, 17, 99, 256, 31, 8]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_all_modules(client: interpose.Client, checkpoints: dict[str, Path], name: str) -> None:
    model = client.model(name)
    with model.scan(PROMPT, max_tokens=2) as scanner:
        shapes = scanner.cache()
        norm = model.final_norm(model.blocks[1].resid_post).save()
        print("in a scan")
    with model.trace(temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT):
            cache = tracer.cache()
        with tracer.invoke([3, 77]):
            beside = tracer.cache(modules=["logits"])
    oracle = Oracle(checkpoints[name])
    truth = oracle.run(PROMPT, 2)
    compared = 0
    for location in locations(checkpoints[name]):
        if location.kind != "output" or location.path in cache.refused:
            continue
        for step in range(2):
            found = cache[location.path].output[step]
            assert difference(found, truth.value(location.path, "output", step)) <= 1e-4, (location.path, step)
        compared += 1
    assert compared > 20
    assert all("split over the tensor-parallel ranks" in reason for reason in cache.refused.values())
    for step, logits in enumerate(oracle.run([3, 77], 2).logits):
        assert difference(beside["logits"].output[step], logits) <= 1e-4
    assert shapes.keys() == cache.keys() and shapes.refused.keys() == cache.refused.keys()
    for path in cache:
        assert form(shapes[path].output) == form(cache[path].output), path
    assert norm.is_meta and norm.shape[0] == len(PROMPT)
    assert scanner.usage.generated_tokens == scanner.usage.prompt_tokens == 0


def form(value: Any) -> Any:
    """Shapes and types in the places of tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return [form(item) for item in value] if isinstance(value, tuple | list) else value


def test_a_scan_of_too_many_steps(model: interpose.Model) -> None:
    with pytest.raises(interpose.InvalidArgument, match="max_tokens=2 shows them"):
        with model.scan(PROMPT, max_tokens=100):
            pass


def test_an_explanation_names_the_tier_and_the_line(model: interpose.Model) -> None:
    """The service runs plans on CPUs, and no rank has all of what is between the two projections of an MLP."""

    def block(tracer: Any) -> None:
        kept = [].save()
        for _ in tracer.iter[1:4]:
            kept.append(model.blocks[1].mlp.act.save())
        for _ in tracer.iter[5:8]:
            h = model.blocks[1].resid_post
            if h.norm() > 3:
                h.save()

    found = model.explain(block, PROMPT, max_tokens=10)
    first, second = found.parts
    assert "on a CPU" in found.notes[0]
    assert (first.tier, first.best, len(first.reads)) == ("plan", "plan", 1), first
    assert "spread over ranks" in first.why, first
    assert (second.best, second.at_text) == ("block", "h.save()") and "torch.where" in second.instead
    with model.trace(PROMPT, max_tokens=3, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            model.logits.output
    tiers = (
        tracer.accounting.tiers
    )  # the first step after the prompt may be the first that shows the form of the logits
    assert tiers["plan"] in (1, 2) and tiers["block"] == 3 - tiers["plan"]
    with pytest.raises(interpose.InterventionError, match="ZeroDivisionError"):
        model.explain("x = 1 / 0\nfor step in tracer.iter[:]:\n    model.logits.output\n")
