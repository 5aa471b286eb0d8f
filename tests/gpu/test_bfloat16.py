"""In bfloat16 every location is as near to the float32 truth as transformers' own bfloat16 forward on the same GPU is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import Bench
from tests.engine.fidelity.test_fidelity import PROMPTS, STEPS, read_everything
from tests.engine.harness import Block
from tests.gpu.conftest import deployed
from tests.oracle import Oracle, locations

# ‖a - b‖ / ‖b‖ of one value against float32, over what transformers' own bfloat16 forward is off by at most.
TIMES = 2.0


@pytest.fixture(scope="module")
def half(runner: str, checkpoint: Path) -> Iterator[Bench]:
    bench = Bench(checkpoint, checkpoint.name, **deployed("bfloat16"))
    yield bench
    bench.engine.close()


def apart(a: Any, b: Any) -> float:
    if isinstance(b, tuple | list):
        return max(apart(one, other) for one, other in zip(a, b, strict=True))
    if b is None:
        assert a is None
        return 0.0
    assert a.shape == b.shape
    a, b = a.cpu().double(), b.cpu().double()
    return float((a - b).norm() / b.norm())


def test_every_location_in_prefill_and_decode(half: Bench) -> None:
    theirs = Oracle(half.checkpoint, dtype=torch.bfloat16, device="cuda")
    listed = locations(half.checkpoint)
    errors: dict[str, tuple[float, float]] = {}
    for prompt in PROMPTS:
        [ran] = half.engine.run(Block(prompt, read_everything(half, STEPS), {"max_tokens": STEPS, "ignore_eos": True}))
        assert ran.failure is None, ran.failure
        other = theirs.run(prompt, STEPS, force=ran.token_ids)
        truth = half.oracle.run(prompt, STEPS, force=ran.token_ids)
        for i, value in enumerate(ran.saved["values"]):
            at, step = listed[i % len(listed)], i // len(listed)
            expected = truth.value(at.path, at.kind, step)
            mine, its = errors.get(str(at), (0.0, 0.0))
            their = apart(other.value(at.path, at.kind, step), expected)
            errors[str(at)] = max(mine, apart(value, expected)), max(its, their)
        for step, logits in enumerate(truth.logits):  # the token is one of those that may round to the largest
            assert logits.max() - logits[0, ran.token_ids[step]] < 0.05 * logits.abs().max()
    mine, its = (max(pair[i] for pair in errors.values()) for i in (0, 1))
    print(f"{half.arch} in bfloat16: the largest error is {mine:.1e}, transformers' {its:.1e}")
    for at, (mine, its) in errors.items():
        assert mine <= TIMES * its, at
