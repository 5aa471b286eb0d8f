"""interp-engine's points over a served model: captured values equal transformers, in the shapes that they have there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import interpose
from interpose.cli.demo_model import Shape, write_demo_model
from interpose.compat.interp_engine import Address, capture, run_with_cache
from tests.engine.harness import LocalEngine
from tests.engine.notebook import notebook
from tests.oracle import Oracle, difference

PROMPT = [5, 400, 17, 99, 256, 31, 8]
TOLERANCE = 1e-4
LAYER = 1
# The canonical value of each point of a layer, and the point's shape after batch and tokens where it is not [width].
DENSE = {
    "resid_pre": "resid_pre",
    "attn_in": "attn_in",
    "q_norm_in": "attn.q",
    "k_norm_in": "attn.k",
    "q_norm_out": "attn.norm_q",
    "k_norm_out": "attn.norm_k",
    "value": "attn.v",
    "attn_probs": "attn.pattern",
    "z": "attn.z",
    "attn_out_post": "attn_out",
    "resid_mid": "resid_mid",
    "mlp_in": "mlp_in",
    "mlp_out_post": "mlp_out",
    "resid_post": "resid_post",
}
POINTS = {
    "qwen3": DENSE | {"mlp_pre": "mlp.gate", "mlp_pre_linear": "mlp.up", "mlp_act": "mlp.act"},
    "qwen3_moe": DENSE
    | {"router_logits": "mlp.router_logits", "expert_indices": "mlp.experts", "expert_weights": "mlp.expert_weights"},
}


@pytest.fixture(scope="module", params=list(POINTS))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, LocalEngine]]:
    checkpoint = tmp_path_factory.mktemp("checkpoint") / request.param
    write_demo_model(checkpoint, request.param, Shape(layers=2, hidden=128, context=256))
    engine = LocalEngine(checkpoint, dtype="float32")
    yield request.param, checkpoint, engine
    assert engine.interleaver.idle, "a trace left something behind"
    engine.close()


def test_every_point_equals_transformers(served: tuple[str, Path, LocalEngine]) -> None:
    arch, checkpoint, engine = served
    model = notebook(engine)
    truth = Oracle(checkpoint, canonical=True).run(PROMPT, 1)
    points = {Address(name, LAYER): f"blocks.{LAYER}.{value}" for name, value in POINTS[arch].items()}
    points |= {Address("embeddings"): "embed.output", Address("final_norm"): "final_norm.output"}
    backwards = list(points)[::-1]  # the order of the forward pass is the module's business
    cache = capture(model, torch.tensor([PROMPT]), backwards)
    assert list(cache) == backwards
    for address, path in points.items():
        value = truth.value(path, "output", 0)
        value = value.flatten(1) if address.name in ("z", "value") else value
        assert cache[address].shape == (1, *value.shape), address
        assert difference(cache[address][0], value) <= TOLERANCE, address
    assert cache.get("attn_probs", LAYER).shape[2:] == (len(PROMPT), len(PROMPT))
    again = run_with_cache(model, PROMPT, ["resid_post.0"])
    assert difference(again["resid_post.0"][0], truth.value("blocks.0.resid_post", "output", 0)) <= TOLERANCE


def test_what_the_other_model_has_is_refused(served: tuple[str, Path, LocalEngine]) -> None:
    arch, _, engine = served
    name = "router_logits.0" if arch == "qwen3" else "mlp_act.0"
    with pytest.raises(interpose.UnknownLocation, match="has no counterpart in this model"):
        capture(notebook(engine), PROMPT, [name])
