"""In bfloat16 every location is as near to transformers' bfloat16 forward on the same GPU as rounding allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import Bench
from tests.engine.harness import Block
from tests.engine.test_fidelity import PROMPTS, STEPS, read_everything
from tests.gpu.conftest import deployed
from tests.oracle import Oracle, locations

# ‖a - b‖ / ‖b‖ of one value; two bfloat16 forwards that add in another order differ by about 1e-2 at the end.
TOLERANCE = 3e-2


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
    a, b = a.double(), b.cpu().double()
    return float((a - b).norm() / b.norm())


def test_every_location_in_prefill_and_decode(half: Bench) -> None:
    oracle = Oracle(half.checkpoint, dtype=torch.bfloat16, device="cuda")
    listed = locations(half.checkpoint)
    largest = ("", 0.0)
    for prompt in PROMPTS:
        [ran] = half.engine.run(Block(prompt, read_everything(half, STEPS), {"max_tokens": STEPS, "ignore_eos": True}))
        assert ran.failure is None, ran.failure
        truth = oracle.run(prompt, STEPS, force=ran.token_ids)
        for i, value in enumerate(ran.saved["values"]):
            at, step = listed[i % len(listed)], i // len(listed)
            largest = max(largest, (f"{at} in step {step}", apart(value, truth.value(at.path, at.kind, step))), key=_by)
        for step, logits in enumerate(truth.logits):  # the token is one of those that may round to the largest
            assert logits.max() - logits[0, ran.token_ids[step]] < 0.05 * logits.abs().max()
    print(f"{half.arch} in bfloat16: the largest error is {largest[1]:.1e}, at {largest[0]}")
    assert largest[1] <= TOLERANCE, largest


def _by(found: tuple[str, float]) -> float:
    return found[1]
