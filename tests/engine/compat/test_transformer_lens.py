"""TransformerLens over a served model: cached values, hooks and logits equal transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import interpose
from interpose.cli.demo_model import Shape, write_demo_model
from interpose.compat.transformer_lens import HookedModel
from tests.engine.harness import LocalEngine
from tests.engine.notebook import notebook
from tests.oracle import Edit, Oracle, difference

PROMPT = [5, 400, 17, 99, 256, 31, 8]
TOLERANCE = 1e-4
LAYERS = 2


@dataclass
class Hooked:
    """A served model with hook names, and the truth about it."""

    arch: str
    model: HookedModel
    oracle: Oracle


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def hooked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hooked]:
    shape = Shape(layers=LAYERS, hidden=128, context=256)
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param, shape)
    engine = LocalEngine(checkpoint, dtype="float32")
    yield Hooked(request.param, HookedModel(notebook(engine)), Oracle(checkpoint, canonical=True))
    assert engine.interleaver.idle, "a trace left something behind"
    engine.close()


def test_every_hook_equals_transformers(hooked: Hooked) -> None:
    logits, cache = hooked.model.run_with_cache(torch.tensor([PROMPT]))
    truth = hooked.oracle.run(PROMPT, 1)
    assert list(cache) == list(hooked.model.hook_dict)
    assert len(cache) == 1 + LAYERS * (15 if hooked.arch == "llama" else 14)  # GPT-2's MLP has no gate
    for name, place in hooked.model.hook_dict.items():
        path = f"{place.envoy.path}.{place.value}"
        value = truth.value(path, "output", 0)
        assert cache[name].shape == (1, *value.shape), name
        assert difference(cache[name][0], value) <= TOLERANCE, name
    assert logits.shape[:2] == (1, len(PROMPT))
    assert difference(logits[0, -1:], truth.value("logits", "output", 0)) <= TOLERANCE
    assert torch.equal(cache["resid_post", -1], cache[f"blocks.{LAYERS - 1}.hook_resid_post"])
    assert cache.stack_activation("resid_post").shape[:3] == (LAYERS, 1, len(PROMPT))
    assert cache.remove_batch_dim()["z", 0].shape == cache["z", 0].shape[1:]


def test_a_filter_chooses(hooked: Hooked) -> None:
    _, by_function = hooked.model.run_with_cache(PROMPT, names_filter=lambda name: name.endswith("hook_resid_mid"))
    logits, by_name = hooked.model.run_with_cache(PROMPT, names_filter="blocks.1.attn.hook_z", return_type=None)
    assert list(by_function) == [f"blocks.{layer}.hook_resid_mid" for layer in range(LAYERS)]
    assert list(by_name) == ["blocks.1.attn.hook_z"] and logits is None
    with pytest.raises(KeyError, match="names_filter left it out"):
        by_name["z", 0]


def test_hooks_change_what_transformers_does(hooked: Hooked) -> None:
    def ablate(value: Any, hook: Any) -> None:
        if hook.layer() == 1:
            value[:, :, 0] = 0

    def double(value: Any, hook: Any) -> Any:
        return value * 2

    hooks: list[tuple[Any, Any]] = [
        (lambda name: name.endswith("attn.hook_z"), ablate),
        ("blocks.0.hook_resid_post", double),
    ]
    logits = hooked.model.run_with_hooks(PROMPT, fwd_hooks=hooks)

    def without_head(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, 0] = 0
        return value

    edits = [
        Edit("blocks.0.resid_post", "output", lambda value: value * 2),
        Edit("blocks.1.attn.z", "output", without_head),
    ]
    truth = hooked.oracle.run(PROMPT, 1, edits)
    plain, _ = hooked.model.run_with_cache(PROMPT, names_filter=[])
    assert difference(logits[0, -1:], truth.value("logits", "output", 0)) <= TOLERANCE
    assert difference(logits, plain) > 1e-2


def test_what_has_no_counterpart_says_why(hooked: Hooked) -> None:
    with pytest.raises(interpose.UnknownLocation, match="the norm gives to attention is attn_in"):
        hooked.model.run_with_cache(PROMPT, names_filter="blocks.0.hook_attn_in")
    if hooked.arch == "gpt2":
        with pytest.raises(interpose.UnknownLocation, match="has no gate"):
            hooked.model.run_with_cache(PROMPT, names_filter="blocks.0.mlp.hook_pre_linear")
