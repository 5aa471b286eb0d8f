"""What single experts of a mixture compute, where a block changes what they are given, and where it cannot be told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.oracle import Edit, Oracle, difference
from tests.oracle.experts import sorted_experts

ARCHITECTURES = ("qwen3_moe", "olmoe")
PROMPT = [12, 250, 33, 8, 441, 90, 14]
SAMPLING = {"max_tokens": 3, "ignore_eos": True}
MLP = "model.blocks[1].mlp"
VALUES = ("expert_act", "expert_out")


class Bench:
    """An engine, and the truth about its model."""

    def __init__(self, folder: Any, arch: str) -> None:
        self.checkpoint = write_demo_model(folder / arch, arch, Shape(layers=2, hidden=128, context=256))
        self.engine = LocalEngine(self.checkpoint, dtype="float32")
        self.oracle = Oracle(self.checkpoint, canonical=True)

    @property
    def runner(self) -> Any:
        """The second layer's module that runs the experts."""
        return self.engine.worker.interpose_tree.find("blocks.1.mlp").views["expert_out"].node.layer


@pytest.fixture(scope="module", params=ARCHITECTURES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("mixture"), request.param)
    yield bench
    assert bench.engine.interleaver.idle
    bench.engine.close()


def reading(change: str = "pass") -> str:
    return (
        f"values = {{}}\nfor step in tracer.iter[:]:\n    {change}\n"
        f"    values['expert_act', step] = {MLP}.expert_act.save()\n"
        f"    values['expert_out', step] = {MLP}.expert_out.save()\nvalues.save()\n"
    )


def check(bench: Bench, values: dict[Any, torch.Tensor], edits: list[Edit]) -> None:
    truth = bench.oracle.run(PROMPT, 3, edits)
    assert len(values) == 6
    for (name, step), value in values.items():
        expected = truth.value(f"blocks.1.mlp.{name}", step=step)
        assert difference(sorted_experts(value), sorted_experts(expected)) <= 1e-4


def forced(logits: torch.Tensor) -> torch.Tensor:
    changed = logits.clone()
    changed[:, 3], changed[:, 6] = 9.0, 8.0
    return changed


@pytest.mark.parametrize(
    "change", [f"{MLP}.router_logits[:, 3] = 9.0; {MLP}.router_logits[:, 6] = 8.0", f"{MLP}.router_logits = forced"]
)
def test_experts_that_a_block_forced(bench: Bench, change: str) -> None:
    """The logits as the block left them choose the experts, in every step and with other requests beside it."""
    if change.endswith("forced"):
        change = f"x = {MLP}.router_logits.clone(); x[:, 3] = 9.0; x[:, 6] = 8.0; {MLP}.router_logits = x"
    others = [[Block([5, 6, 9 + i], reading(), SAMPLING)] for i in range(3)]
    *_, ran = bench.engine.run_traces([*others, [Block(PROMPT, reading(change), SAMPLING)]])
    assert ran.failure is None, ran.failure
    edit = Edit("blocks.1.mlp.router_logits", "output", forced)
    check(bench, ran.saved["values"], [edit])
    untouched = bench.oracle.run(PROMPT, 1).value("blocks.1.mlp.expert_out", step=0)
    assert difference(sorted_experts(untouched), sorted_experts(ran.saved["values"]["expert_out", 0])) > 1e-2


def test_experts_of_a_changed_stream(bench: Bench) -> None:
    ran, *_ = bench.engine.run_traces([[Block(PROMPT, reading("model.blocks[1].resid_mid *= 2"), SAMPLING)]])
    assert ran.failure is None, ran.failure
    check(bench, ran.saved["values"], [Edit("blocks.1.resid_mid", "output", lambda value: value * 2, in_place=True)])


def test_the_order_of_the_experts_is_that_of_their_weights(bench: Bench) -> None:
    source = f"""
experts = {MLP}.experts.save()
weights = {MLP}.expert_weights.save()
out = {MLP}.expert_out.save()
total = {MLP.replace("blocks", "model.layers")}.output.save()
"""
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    saved = ran.saved
    summed = (saved["out"] * saved["weights"].unsqueeze(-1)).sum(1)
    assert difference(summed, saved["total"]) <= 1e-4


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("statement", ["{at}[:] = 0", "{at} = 0", "x = {at}; x += 1"])
def test_a_change_is_refused(bench: Bench, name: str, statement: str) -> None:
    [ran] = bench.engine.run(Block(PROMPT, statement.format(at=f"{MLP}.{name}") + "\ny = model.logits.output.save()"))
    assert ran.failure is not None
    assert f"blocks[1].mlp.{name} is computed for the block" in ran.failure.message
    assert "mlp.router_logits" in ran.failure.message


@pytest.mark.parametrize("name", VALUES)
def test_refused_where_the_layer_returns_something_else(bench: Bench, name: str) -> None:
    """A layer whose output is not the weighted sum of its experts."""
    handle = bench.runner.register_forward_hook(lambda module, args, output: output * 1.01, prepend=True)
    try:
        [ran] = bench.engine.run(Block(PROMPT, f"x = {MLP}.{name}.save()"))
    finally:
        handle.remove()
    assert ran.failure is not None
    assert "what the layer returned is not what its experts and its router give" in ran.failure.message
    [ran] = bench.engine.run(Block(PROMPT, f"x = {MLP}.{name}.save()"))
    assert ran.failure is None


def test_wide_hidden_layers_in_stripes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.views.expert_values._STRIPE", 32)
    [ran] = bench.engine.run(Block(PROMPT, reading(), SAMPLING))
    assert ran.failure is None, ran.failure
    check(bench, ran.saved["values"], [])


def test_too_many_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.views.expert_values._LARGEST", 1000)
    [ran] = bench.engine.run(Block(PROMPT, f"x = {MLP}.expert_act.save()"))
    assert ran.failure is not None
    assert "7 tokens' experts are more than fit" in ran.failure.message
