"""A model with a Mamba 2 layer and an attention layer, over two ranks: what is given is what transformers has, and the projection
whose columns the model spreads in a way of its own is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.block.fiber import Fiber  # noqa: F401 - before transformers makes a model, see there
from interpose.cli.demo_model import Shape, write_model
from interpose.modules import serves
from interpose.modules.tree import tree_of
from tests.engine.harness import Block
from tests.engine.spread import SpreadEngine
from tests.oracle import difference

PROMPT = [5, 400, 17, 99, 256, 31, 8]
TOLERANCE = 1e-4
MIXER = "model.model.layers[0].mamba"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GraniteMoeHybridConfig

    shape = Shape(layers=2, hidden=128, context=256)
    config = GraniteMoeHybridConfig(
        num_hidden_layers=2,
        hidden_size=shape.hidden,
        shared_intermediate_size=2 * shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,  # which two ranks cannot share, so each holds a copy
        mamba_d_state=16,
        mamba_expand=2,
        mamba_chunk_size=32,
        max_position_embeddings=shape.context,
        position_embedding_type="rope",
    )
    return write_model(tmp_path_factory.mktemp("checkpoint") / "hybrid", config, shape)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[SpreadEngine]:
    engine = SpreadEngine(checkpoint, 2, 1, dtype="float32")
    yield engine
    assert engine.worker.idle, "a trace left something behind"
    engine.close()


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What transformers' modules are given and return for the prompt, each without the batch dimension."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    found: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            given, returned = args[0] if args else None, output[0] if isinstance(output, tuple) else output
            for kind, value in (("input", given), ("output", returned)):
                if isinstance(value, torch.Tensor):
                    found[f"{name}.{kind}"] = value.detach()[0]

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    with torch.no_grad():
        found["logits"] = model(torch.tensor([PROMPT])).logits[0, -1:]
    return found


def read(engine: SpreadEngine, *places: str) -> list[torch.Tensor]:
    source = "values = []\n" + "\n".join(f"values.append({place})" for place in places) + "\nvalues.save()"
    [ran] = engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    values: list[torch.Tensor] = ran.saved["values"]
    return values


def test_what_is_given_is_what_transformers_has(engine: SpreadEngine, truth: dict[str, torch.Tensor]) -> None:
    places = {
        f"{MIXER}.in_proj.input": "model.layers.0.mamba.in_proj.input",
        f"{MIXER}.out_proj.input": "model.layers.0.mamba.out_proj.input",
        f"{MIXER}.out_proj.output[0]": "model.layers.0.mamba.out_proj.output",
        "model.logits.output": "logits",
    }
    for place, value in zip(places, read(engine, *places), strict=True):
        assert difference(value, truth[places[place]]) <= TOLERANCE, place


def test_the_projection_that_the_model_spreads_in_its_own_way_is_refused(engine: SpreadEngine) -> None:
    for source in (f"x = {MIXER}.in_proj.output[0].save()", f"{MIXER}.in_proj.output[0][:] = 0"):
        [ran] = engine.run(Block(PROMPT, source))
        assert ran.failure is not None
        message = "in_proj.output[0] cannot be given: which part of it each tensor-parallel rank holds is not known"
        assert message in ran.failure.message
    [ran] = engine.run(Block(PROMPT, f"x = {MIXER}.in_proj(torch.ones(2, 128)).save()"))
    assert ran.failure is not None and "is not known" in ran.failure.message


def test_the_description_says_what_is_refused(engine: SpreadEngine) -> None:
    model = tree_of(engine.describe())
    for place in ("in_proj.output", "out_proj.output", "in_proj.input"):
        verdict = serves.verdict(model, f"model.layers[0].mamba.{place}")
        [ran] = engine.run(Block(PROMPT, f"x = {MIXER}.{place}"))
        assert (ran.failure is None) == bool(verdict) == (place != "in_proj.output"), place
        assert bool(verdict) or verdict.reason in ran.failure.message
