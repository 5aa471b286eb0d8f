"""A long prompt of an engine beside transformers' eager forward of the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from executor.block.fiber import Fiber  # noqa: F401 - before transformers makes a model, see there
from interpose.cli.demo_model import Shape
from tests.engine.harness import Block, LocalEngine
from tests.oracle import difference

_OTHER, _PLAIN = 70, 300  # tokens of the requests beside


def check_long_prompt(
    engine: LocalEngine,
    checkpoint: Path,
    shape: Shape,
    tokens: int,
    changed: bool,
    device: str = "cpu",
    relative: float = 0.0,
) -> None:
    """Run a trace of a long prompt beside a short trace and a plain request, and compare it with transformers.

    The trace reads the second layer's output and the logits, each of which may differ by 1e-4.

    Args:
        engine: a llama with a context of that length.
        checkpoint: the model.
        shape: of the model.
        tokens: the length of the prompt.
        changed: whether the trace adds a vector to the first layer's output.
        device: where transformers computes.
        relative: how much the logits may differ as a part of the largest logit, if that is more than 1e-4.
    """
    rng = random.Random(changed)
    ids = [rng.randrange(5, 500) for _ in range(tokens)]
    vector = torch.linspace(-1, 1, shape.hidden)
    change = "model.blocks[0].resid_post += v\n" if changed else ""
    source = f"{change}h = model.blocks[1].resid_post.save()\nl = model.logits.output.save()\n"
    beside = "z = model.blocks[1].attn.z.save()\n"
    ran, other, _ = engine.run_traces(
        [[Block(ids, source, captured={"v": vector})], [Block(ids[:_OTHER], beside)]], plain=(ids[:_PLAIN],)
    )
    assert ran.failure is None and other.failure is None, (ran.failure, other.failure)
    truth, logits = _eager(checkpoint, ids, vector if changed else None, device)
    assert ran.saved["h"].shape == truth.shape == (tokens, shape.hidden)
    assert difference(ran.saved["h"], truth) <= 1e-4
    assert difference(ran.saved["l"], logits) <= max(1e-4, relative * float(logits.abs().max()))
    assert other.saved["z"].shape[0] == _OTHER


def _eager(
    checkpoint: Path, ids: list[int], vector: torch.Tensor | None, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the second layer's output, [tokens, hidden], and the last row of the logits, [1, vocabulary].

    Eager attention over all rows at once would need 16 GiB, so the rows come 500 at a time, with a cache.

    Args:
        checkpoint: the model.
        ids: the prompt.
        vector: added to the first layer's output, [hidden]; None for no change.
        device: where it is computed.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").to(
        device
    )
    layers, kept, cache = model.model.layers, list[torch.Tensor](), DynamicCache()
    if vector is not None:
        added = vector.to(device)
        layers[0].register_forward_hook(lambda module, args, output: output + added)
    layers[1].register_forward_hook(lambda module, args, output: kept.append(output[0].clone()))
    logits = torch.empty(0)
    with torch.no_grad():
        for start in range(0, len(ids), 500):
            rows = torch.tensor([ids[start : start + 500]], device=device)
            logits = model(rows, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0]
    return torch.cat(kept).cpu(), logits.cpu()
