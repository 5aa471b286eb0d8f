"""Quantised weights and caches on a GPU, under the V2 runner with graphs: values, changes, applied modules, weights, experts.

As `tests/engine/model/test_quantised.py`, with the kernels of GPUs: FP8 for each tensor and for each block, GPTQ, AWQ,
compressed-tensors, and MXFP4 experts of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from vllm.compilation.monitor import set_cudagraph_capturing_enabled

from interpose.cli.demo_model import Shape, write_model
from tests.engine.harness import Block
from tests.engine.notebook import notebook
from tests.engine.quantised import PROMPT, SAMPLING, Quantised
from tests.gpu.conftest import deployed
from tests.oracle.experts import sorted_experts

# As many key/value heads as query heads: blocks of 128 columns then end where the parts of a merged projection end.
SHAPE = Shape(layers=2, hidden=128, heads=4, kv_heads=4, context=256)
SINKS = Shape(layers=2, hidden=256, heads=4, kv_heads=2, context=256)
CHANGED = ("resid_pre", "attn.v", "attn.z", "mlp.act", "resid_post")


def gpt_oss(folder: Path) -> Path:
    """A small gpt-oss with plain weights."""
    config = transformers.GptOssConfig(
        num_hidden_layers=SINKS.layers,
        hidden_size=SINKS.hidden,
        intermediate_size=SINKS.hidden,
        num_attention_heads=SINKS.heads,
        num_key_value_heads=SINKS.kv_heads,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=128,
    )
    return write_model(folder / "gpt_oss", config, SINKS)


@pytest.fixture(autouse=True, scope="module")
def second_runner() -> Iterator[None]:
    """vLLM's V2 runner, and captures, which an engine of the first one forbids to its process."""
    set_cudagraph_capturing_enabled(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        yield


def opened(folder: Path, method: str, **options: object) -> Quantised:
    made = gpt_oss(folder) if method == "mxfp4" else None
    return Quantised(folder, method, shape=SHAPE, checkpoint=made, device="cuda", **deployed("bfloat16"), **options)


# These come first: a process has the groups of the model that it loaded first, and those of a dense model have no experts.
@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_quantised_experts_give_outputs_and_refuse_hidden_layers(
    second_runner: None, tmp_path: Path, method: str
) -> None:
    bench = Quantised(tmp_path, method, "qwen3_moe", SHAPE, device="cuda", **deployed("bfloat16"))
    try:
        check_experts(bench)
    finally:
        bench.engine.close()


def check_experts(bench: Quantised) -> None:
    """Compare the first layer's mixture with transformers'."""
    names = ("mlp.router_logits", "mlp.experts", "mlp.expert_out", "mlp_out")
    reads = "\n".join(f"values[{name!r}] = model.blocks[0].{name}.save()" for name in names)
    given = Block(PROMPT, f"values = {{}}\n{reads}\nvalues.save()", SAMPLING)
    refused = Block(PROMPT, "x = model.blocks[0].mlp.expert_act.save()")
    (ran,), (other,) = ([one] for one in bench.engine.run_traces([[given], [refused]]))
    assert other.failure is not None and "quantised" in other.failure.message
    assert ran.failure is None, ran.failure
    truths = bench.truths(PROMPT, ran.token_ids)
    values = {name: value.cpu() for name, value in ran.saved["values"].items()}
    experts = [values["mlp.experts"], *(one.value("blocks.0.mlp.experts").cpu() for one in truths)]
    mine, *theirs = (one.long().sort(-1).values for one in experts)
    # Rounding may choose another expert that is nearly as good; such a token is not compared.
    same = torch.stack([(mine == one).all(-1) for one in theirs]).all(0)
    assert same.sum() >= len(same) - 2
    for name in ("mlp.router_logits", "mlp.expert_out", "mlp_out"):
        compared = [values[name], *(one.value(f"blocks.0.{name}").cpu() for one in truths)]
        compared = [one.float()[same] for one in compared]
        if name.endswith("expert_out"):
            compared = [sorted_experts(one) for one in compared]
        bench.check(name, *compared)


def test_experts_in_four_bits(second_runner: None, tmp_path: Path) -> None:
    bench = opened(tmp_path, "mxfp4")
    try:
        check_experts(bench)
    finally:
        bench.engine.close()


def test_a_cache_of_eight_bits(second_runner: None, tmp_path: Path) -> None:
    """Values are near the truth within what eight bits of keys and values make of it; the pattern is refused."""
    bench = opened(tmp_path, "gptq", kv_cache_dtype="fp8")
    try:
        source = "v = model.blocks[1].attn.z.save()\nr = model.blocks[1].resid_post.save()"
        refused = Block(PROMPT, "x = model.blocks[1].attn.pattern.save()")
        (ran,), (other,) = ([one] for one in bench.engine.run_traces([[Block(PROMPT, source, SAMPLING)], [refused]]))
        assert ran.failure is None, ran.failure
        assert other.failure is not None and "quantized keys" in other.failure.message
        exact, _ = bench.truths(PROMPT, ran.token_ids)
        for name, path in (("v", "blocks.1.attn.z"), ("r", "blocks.1.resid_post")):
            truth = exact.value(path)
            off = (ran.saved[name].cpu().float() - truth).norm() / truth.norm()
            # Half a step of three bits of mantissa; queries are rounded too.
            assert off <= 2**-4, f"{path} is off by {off:.1e}"
    finally:
        bench.engine.close()


@pytest.fixture(scope="module", params=["fp8", "fp8-block", "gptq", "awq", "w4a16", "int8"])
def bench(
    request: pytest.FixtureRequest, second_runner: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Quantised]:
    bench = opened(tmp_path_factory.mktemp("quantised"), request.param)
    yield bench
    assert bench.engine.interleaver.idle
    bench.engine.close()


def test_every_value_in_prefill_and_decode_beside_others(bench: Quantised) -> None:
    bench.check_every_value()


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_does_what_it_does_in_transformers(bench: Quantised, name: str) -> None:
    bench.check_change(name)


def test_an_applied_module_computes_with_its_quantised_weights(bench: Quantised) -> None:
    bench.check_applied()


def test_a_quantised_weight_is_refused_and_a_plain_one_is_given(bench: Quantised) -> None:
    bench.check_weights()


def test_a_scan_has_the_shapes_of_a_trace(bench: Quantised) -> None:
    model = notebook(bench.engine)
    shapes = []
    for context in (model.scan(PROMPT), model.trace(PROMPT, max_tokens=1, temperature=0.0)):
        with context:
            applied = model.model.layers[1].mlp(model.model.layers[1].mlp.input).save()
        shapes.append((tuple(applied.shape), applied.dtype))
    assert shapes[0] == shapes[1]
