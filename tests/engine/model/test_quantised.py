"""Models with quantised weights, in bfloat16: canonical values, changes, applied modules, and scans.

The truth is transformers' float32 forward on the same weights as plain numbers. A value may be twice as far from it as
transformers' own bfloat16 forward on the plain weights is. FP8 weights need a processor with AMX.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.engine.notebook import notebook
from tests.oracle import Edit, Oracle
from tests.oracle.quantised import quantise

PROMPT = [12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19]
BESIDE = [[5, 9, 301, 77], [3]]
SAMPLING = {"max_tokens": 2, "ignore_eos": True}
TIMES = 2.0
NAMES = ("resid_pre", "attn.q", "attn.k", "attn.v", "attn.rot_q", "attn.rot_k", "attn.pattern", "attn.z", "resid_mid")
NAMES += ("mlp.gate", "mlp.up", "mlp.act", "resid_post")


class Bench:
    """An engine with quantised weights, and transformers with the same weights as plain numbers, exact and rounded."""

    def __init__(self, folder: Any, method: str) -> None:
        shape = Shape(layers=2, hidden=128, context=256)
        packed, plain = quantise(write_demo_model(folder / "model", "llama", shape), folder, method)
        self.method = method
        self.engine = LocalEngine(packed, dtype="bfloat16")
        self.exact = Oracle(plain, canonical=True)
        self.rounded = Oracle(plain, canonical=True, dtype=torch.bfloat16)


@pytest.fixture(scope="module", params=["gptq", "awq"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("quantised"), request.param)
    yield bench
    assert bench.engine.interleaver.idle
    bench.engine.close()


def distance(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value.float() - truth.float()).norm() / truth.float().norm())


def check(bench: Bench, name: str, value: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> None:
    assert value.shape == exact.shape, name
    mine, theirs = distance(value, exact), distance(rounded, exact)
    allowed = max(TIMES * theirs, 4e-3)
    assert mine <= allowed, f"{name} is off by {mine:.1e}, transformers' bfloat16 by {theirs:.1e}"


def test_every_value_in_prefill_and_decode_beside_others(bench: Bench) -> None:
    reads = "\n".join(f"    values[{name!r}, step] = model.blocks[1].{name}.save()" for name in NAMES)
    source = f"values = {{}}\nfor step in tracer.iter[:]:\n{reads}\n    values['logits', step] = model.logits.output.save()\n"
    alone = [bench.engine.plain(prompt).token_ids for prompt in BESIDE]
    traces = [[Block(prompt, source + "values.save()\n", SAMPLING)] for prompt in (PROMPT, [7, 8, 9])]
    rans = bench.engine.run_traces(traces, plain=tuple(BESIDE))
    assert [ran.token_ids for ran in rans[2:]] == alone
    for prompt, ran in zip((PROMPT, [7, 8, 9]), rans, strict=False):
        assert ran.failure is None, ran.failure
        exact, rounded = (oracle.run(prompt, 2, force=ran.token_ids) for oracle in (bench.exact, bench.rounded))
        for (name, step), value in ran.saved["values"].items():
            if name == "logits":
                check(bench, name, value, exact.logits[step], rounded.logits[step])
            else:
                truths = (one.value(f"blocks.1.{name}", step=step) for one in (exact, rounded))
                check(bench, f"{name} in step {step}", value, *truths)


def halved(value: torch.Tensor) -> torch.Tensor:  # any shape
    value[..., ::2] *= 0.5
    return value


@pytest.mark.parametrize("name", [name for name in NAMES if name != "attn.pattern"])
def test_a_change_does_what_it_does_in_transformers(bench: Bench, name: str) -> None:
    at = f"model.blocks[1].{name}"
    source = f"""\
logits = []
for step in tracer.iter[:]:
    {at}[..., ::2] = {at}[..., ::2] * 0.5
    logits.append(model.logits.output)
logits.save()
"""
    ran, *_ = bench.engine.run_traces([[Block(PROMPT, source, SAMPLING)]], plain=tuple(BESIDE))
    assert ran.failure is None, ran.failure
    edit = Edit(f"blocks.1.{name}", "output", halved)
    exact, rounded = (oracle.run(PROMPT, 2, [edit], force=ran.token_ids) for oracle in (bench.exact, bench.rounded))
    untouched = bench.exact.run(PROMPT, 2, force=ran.token_ids)
    assert distance(exact.logits[0], untouched.logits[0]) > 1e-2
    for step, logits in enumerate(ran.saved["logits"]):
        check(bench, f"{name} changed, step {step}", logits, exact.logits[step], rounded.logits[step])


def test_an_applied_module_computes_with_its_quantised_weights(bench: Bench) -> None:
    source = """
mlp = model.model.layers[1].mlp
given = mlp.input.save()
made = mlp(given).save()
gave = mlp.output.save()
"""
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    assert distance(ran.saved["made"], ran.saved["gave"]) <= 4e-3


def test_a_quantised_weight_is_refused(bench: Bench) -> None:
    [ran] = bench.engine.run(Block(PROMPT, "x = model.model.layers[1].mlp.down_proj.qweight.save()"))
    assert ran.failure is not None
    assert "quantised" in ran.failure.message


def test_a_scan_has_the_shapes_of_a_trace(bench: Bench) -> None:
    model = notebook(bench.engine)
    shapes = []
    for context in (model.scan(PROMPT), model.trace(PROMPT, max_tokens=1, temperature=0.0)):
        with context:
            given = model.model.layers[1].mlp.input
            act = model.blocks[1].mlp.act.save()
            applied = model.model.layers[1].mlp(given).save()
        shapes.append([(tuple(value.shape), value.dtype) for value in (act, applied)])
    assert shapes[0] == shapes[1]
    assert shapes[0][0] == ((len(PROMPT), 256), torch.bfloat16)
