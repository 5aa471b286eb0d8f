"""Canonical views equal transformers on every architecture, and so does every change of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.views.pattern import AttentionPattern
from interpose.cli.demo_model import ARCHITECTURES, Shape, write_demo_model
from tests.engine.conftest import expression
from tests.engine.harness import Block, LocalEngine
from tests.oracle import Edit, Oracle, difference, locations
from tests.oracle.experts import sorted_experts

PROMPTS = [[5, 400, 17, 99, 256, 31, 8], [3, 77], [12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19], [222]]
BESIDE = [[9, 9, 9], [100, 200, 300, 400], [44, 1, 7], [350, 20, 6, 5, 4, 3]]
STEPS = 4
SHAPE = Shape(layers=2, hidden=128, context=256)
TOLERANCE = 1e-4
# Computed for the block; the model never holds them.
READ_ONLY = ("pattern", "experts", "expert_weights", "expert_act", "expert_out")
# Given to attention and MLP alike, by architecture.
SHARED = {"cohere": ("attn_in", "mlp_in"), "gptj": ("attn_in", "mlp_in")}
# Sorted by their weights in one implementation and not in the other.
SETS = ("experts", "expert_weights", "expert_act", "expert_out")


class Views:
    """An engine, and the truth about its canonical values."""

    def __init__(self, checkpoint: Path, arch: str, engine: LocalEngine | None = None) -> None:
        self.arch = arch
        self.engine = engine or LocalEngine(checkpoint, dtype="float32")
        self.oracle = Oracle(checkpoint, canonical=True)
        self.paths = [at.path for at in locations(checkpoint, canonical=True)]


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def views(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Views]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param, SHAPE)
    views = Views(checkpoint, request.param)
    yield views
    assert views.engine.interleaver.idle, "a trace left something behind"
    views.engine.close()


def read_everything(paths: list[str], steps: int) -> str:
    reads = "\n".join(f"    values[{path!r}, step] = {place(path)}.save()" for path in paths)
    return f"values = {{}}\nfor step in tracer.iter[:{steps}]:\n{reads}\nvalues.save()\n"


def place(path: str) -> str:
    """What a block writes for a canonical value of the oracle's list."""
    return "model.logits.output" if path == "logits" else expression(path)


def error_of(path: str, value: torch.Tensor, truth: torch.Tensor) -> float:
    if path.endswith(SETS):  # the same experts in any order
        value, truth = sorted_experts(value).to(truth.dtype), sorted_experts(truth)
    return difference(value, truth)


def check_everything(views: Views, prompt: list[int], values: dict[Any, torch.Tensor], tokens: list[int]) -> None:
    truth = views.oracle.run(prompt, STEPS)
    assert tokens == truth.tokens
    assert len(values) == len(views.paths) * STEPS
    for (path, step), value in values.items():
        error = error_of(path, value, truth.value(path, "output", step))
        assert error <= TOLERANCE, f"{path} in step {step} is off by {error}"


def test_every_view_in_prefill_and_decode(views: Views) -> None:
    source = read_everything(views.paths, STEPS)
    for prompt in PROMPTS[:2]:
        [ran] = views.engine.run(Block(prompt, source, {"max_tokens": STEPS, "ignore_eos": True}))
        assert ran.failure is None, ran.failure
        check_everything(views, prompt, ran.saved["values"], ran.token_ids)


def test_eight_at_once_each_gets_its_own(views: Views) -> None:
    source = read_everything(views.paths, STEPS)
    prompts = [*PROMPTS, *BESIDE]
    alone = [views.engine.plain(prompt).token_ids for prompt in BESIDE[:2]]
    traces = [[Block(prompt, source, {"max_tokens": STEPS, "ignore_eos": True})] for prompt in prompts]
    rans = views.engine.run_traces(traces, plain=tuple(BESIDE[:2]))
    for prompt, ran in zip(prompts, rans, strict=False):
        assert ran.failure is None, ran.failure
        check_everything(views, prompt, ran.saved["values"], ran.token_ids)
    assert [ran.token_ids for ran in rans[len(prompts) :]] == alone


def ramp(value: torch.Tensor) -> torch.Tensor:
    """A change of every element, different in each column and head."""
    count = value[0].numel()
    return value * 0.5 + torch.linspace(-0.5, 0.5, count).reshape(value.shape[1:])


def one_head(value: torch.Tensor) -> torch.Tensor:
    value[:, 1] = 2.5
    return value


def last_row(value: torch.Tensor) -> torch.Tensor:
    value[-1] = 2.0
    return value


CHANGES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "assigned": (
        "{at} = {at} * 0.5 + torch.linspace(-0.5, 0.5, {at}[0].numel()).reshape({at}.shape[1:])",
        ramp,
    ),
    "head": ("{at}[:, 1] = 2.5", one_head),
    "row": ("{at}[-1] = 2.0", last_row),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_anywhere_does_what_it_does_in_transformers(views: Views, change: str) -> None:
    statement, apply = CHANGES[change]
    prompt, beside = PROMPTS[0], PROMPTS[2]
    untouched = views.oracle.run(prompt, 1)
    plain = views.engine.plain(beside).token_ids
    for path in views.paths:
        layer = path.split(".")[1] if path.startswith("blocks") else "1"
        # Sliding layers of transformers keep keys apart from what the attention function is given.
        kept_apart = views.arch.startswith("gemma") and path.endswith("rot_k")
        skipped = change == "row" and "resid" not in path
        fixed = path.endswith((*READ_ONLY, *SHARED.get(views.arch, ())))
        if layer != "1" or path == "logits" or fixed or kept_apart or skipped:
            continue
        at = place(path)
        source = (
            f"logits = []\nfor step in tracer.iter[:]:\n    {statement.format(at=at)}\n"
            "    logits.append(model.logits.output.save())\n"
        )
        rans = views.engine.run_traces(
            [[Block(prompt, source, {"max_tokens": 3, "ignore_eos": True})]], plain=(beside,)
        )
        assert rans[0].failure is None, (path, rans[0].failure)
        truth = views.oracle.run(prompt, 3, [Edit(path, "output", apply)])
        assert difference(truth.logits[0], untouched.logits[0]) > 1e-3, f"the change of {path} has no effect to compare"
        assert rans[0].token_ids == truth.tokens, path
        for step, logits in enumerate(rans[0].saved["logits"]):
            error = difference(logits, truth.logits[step])
            assert error <= TOLERANCE, f"{path} changed: logits of step {step} are off by {error}"
        assert rans[1].token_ids == plain, f"a change of {path} reached another request"


REFUSED = {
    "cohere": {"resid_mid": "attention and MLP in parallel"},
    "gptj": {"resid_mid": "attention and MLP in parallel", "mlp.gate": "has no gate"},
    "gpt2": {"mlp.gate": "has no gate"},
    "opt": {"mlp.gate": "has no gate"},
    "olmoe": dict.fromkeys(("mlp.gate", "mlp.up", "mlp.act"), "use mlp.expert_act and mlp.expert_out"),
    "qwen3_moe": dict.fromkeys(("mlp.gate", "mlp.up", "mlp.act"), "use mlp.expert_act and mlp.expert_out"),
}
# The architectures with norms of queries and keys; none of these has norms of values or gates of heads.
NORMED = ("gemma3", "olmoe", "qwen3", "qwen3_moe")


def refused_of(arch: str) -> dict[str, str]:
    norms = ("v",) if arch in NORMED else ("q", "k", "v")
    absent = {f"attn.norm_{one}": f"no norm of {one} alone" for one in norms}
    return {**REFUSED.get(arch, {}), **absent, "attn.gate": "has no gate of the heads' outputs"}


def test_what_an_architecture_does_not_have_is_refused_by_name(views: Views) -> None:
    """Every view is one the oracle has, or says why there is none."""
    refused = refused_of(views.arch)
    tree = views.engine.worker.interpose_tree
    block = tree.pseudo["blocks"].children["1"]
    nodes = [(block, ""), *((child, f"{name}.") for name, child in block.children.items())]
    offered = {f"{prefix}{name}" for node, prefix in nodes for name in node.views}
    assert {path.removeprefix("blocks.1.") for path in views.paths if path.startswith("blocks.1.")} == offered - set(
        refused
    )
    for name, why in refused.items():
        [ran] = views.engine.run(Block([5, 6], f"x = model.blocks[1].{name}.save()"))
        assert ran.failure is not None
        assert why in ran.failure.message
        assert f"blocks[1].{name} cannot be given" in ran.failure.message
        [ran] = views.engine.run(Block([5, 6], f"model.blocks[1].{name} = 0"))
        assert ran.failure is not None
        assert why in ran.failure.message


def test_the_logit_lens_of_the_last_layer_is_the_logits(views: Views) -> None:
    """Norm and unembedding go by canonical names too, with the architecture's own scale and soft cap."""
    source = (
        "lens = model.unembed(model.final_norm(model.blocks[-1].resid_post[-1:])).save()\n"
        "logits = model.unembed.output.save()"
    )
    [ran] = views.engine.run(Block(PROMPTS[0], source))
    assert ran.failure is None, ran.failure
    assert difference(ran.saved["lens"], ran.saved["logits"]) <= TOLERANCE


def test_what_is_computed_for_the_block_cannot_be_changed(views: Views) -> None:
    for statement in ("p = model.blocks[0].attn.pattern\np[0] = 0\n", "model.blocks[0].attn.pattern = 0\n"):
        [ran] = views.engine.run(Block(PROMPTS[0], statement + "x = model.logits.output"))
        assert ran.failure is not None
        assert "never holds it" in ran.failure.message


def test_what_two_parts_are_given_cannot_be_changed(views: Views) -> None:
    for value in SHARED.get(views.arch, ()):
        for statement in (f"model.blocks[1].{value} *= 2\n", f"model.blocks[1].{value} = torch.zeros(7, 128)\n"):
            [ran] = views.engine.run(Block(PROMPTS[0], statement + "x = model.logits.output"))
            assert ran.failure is not None
            assert "attention and MLP are given the same tensor" in ran.failure.message


def test_a_pattern_is_computed_when_it_is_asked_for_and_only_then(
    views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    compute = AttentionPattern.compute

    def counted(self: AttentionPattern, *args: Any) -> torch.Tensor:
        computed.append(self._node.path)
        return compute(self, *args)

    monkeypatch.setattr(AttentionPattern, "compute", counted)
    beside = Block(PROMPTS[1], "x = [b.attn.z.save() for b in model.blocks]", {"max_tokens": 2, "ignore_eos": True})
    asks = Block(
        PROMPTS[0], "p = model.blocks[1].attn.pattern\nagain = (p == model.blocks[1].attn.pattern).all().save()"
    )
    assert views.engine.run(beside)[0].failure is None and not computed
    first, second = views.engine.run(beside, asks)
    assert first.failure is None and second.failure is None and bool(second.saved["again"])
    assert computed == [views.engine.worker.interpose_tree.find("blocks.1.attn").views["pattern"].node.path]


def test_a_stream_and_its_halves_are_not_changed_at_once(views: Views) -> None:
    stream = views.engine.worker.interpose_tree.find("blocks.0").views["resid_post"]
    if len(stream.at) == 1:
        source = "s = model.blocks[0].resid_post\ns[0] = 1\nx = model.blocks[0].resid_post[0].sum().save()"
        [ran] = views.engine.run(Block(PROMPTS[0], source))
        assert float(ran.saved["x"]) == 128.0
        return
    raw = expression(stream.node.path)
    both = f"s = model.blocks[0].resid_post\nr = {raw}.output\nr[0][0] = 1\ns[0] = 1\nx = model.logits.output"
    [ran] = views.engine.run(Block(PROMPTS[0], both))
    assert ran.failure is not None
    assert "were both changed" in ran.failure.message
    seen = f"s = model.blocks[0].resid_post\ns[0] = 1\nr = {raw}.output\nx = (r[0] + r[1])[0].sum().save()"
    [ran] = views.engine.run(Block(PROMPTS[0], seen))
    assert float(ran.saved["x"]) == 128.0
