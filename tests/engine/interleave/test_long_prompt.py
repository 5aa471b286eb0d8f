"""Prompts of up to 32,000 tokens, of which a step has 8,192, are what transformers' eager forward makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.block.fiber import Fiber  # noqa: F401 - before transformers makes a model, see there
from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.oracle import difference

SHAPE = Shape(layers=2, hidden=64, context=32_768)
VECTOR = torch.linspace(-1, 1, SHAPE.hidden)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", SHAPE)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(checkpoint, dtype="float32", max_model_len=SHAPE.context, max_num_batched_tokens=8192)
    yield engine
    assert engine.interleaver.idle
    engine.close()


def eager(checkpoint: Path, ids: list[int], changed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the second layer's output, [tokens, hidden], and the last row of the logits, [1, vocabulary].

    Eager attention over all rows at once would need 16 GiB, so the rows come 500 at a time, with a cache.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    layers, kept, cache = model.model.layers, list[torch.Tensor](), DynamicCache()

    def steer(module: Any, args: Any, output: Any) -> Any:
        return output + VECTOR

    if changed:
        layers[0].register_forward_hook(steer)
    layers[1].register_forward_hook(lambda module, args, output: kept.append(output[0].clone()))
    logits = torch.empty(0)
    with torch.no_grad():
        for start in range(0, len(ids), 500):
            rows = torch.tensor([ids[start : start + 500]])
            logits = model(rows, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0]
    return torch.cat(kept), logits


@pytest.mark.parametrize(("tokens", "changed"), [(32_000, False), (12_000, True)], ids=["read", "changed"])
def test_a_long_prompt(engine: LocalEngine, checkpoint: Path, tokens: int, changed: bool) -> None:
    rng = random.Random(changed)
    ids = [rng.randrange(5, 500) for _ in range(tokens)]
    change = "model.blocks[0].resid_post += v\n" if changed else ""
    source = f"{change}h = model.blocks[1].resid_post.save()\nl = model.logits.output.save()\n"
    beside = "z = model.blocks[1].attn.z.save()\n"
    ran, other, _ = engine.run_traces(
        [[Block(ids, source, captured={"v": VECTOR})], [Block(ids[:70], beside)]], plain=(ids[:300],)
    )
    assert ran.failure is None and other.failure is None, (ran.failure, other.failure)
    truth, logits = eager(checkpoint, ids, changed)
    assert ran.saved["h"].shape == truth.shape == (tokens, SHAPE.hidden)
    assert difference(ran.saved["h"], truth) <= 1e-4
    assert difference(ran.saved["l"], logits) <= 1e-4
    assert other.saved["z"].shape[0] == 70
