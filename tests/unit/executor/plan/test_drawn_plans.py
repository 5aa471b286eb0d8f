"""Plans of operations and arguments at random are refused, fail as a block would, or give the forms that were computed."""

from __future__ import annotations

import random
from collections import Counter

import torch

from tests.unit.executor.plan.drawn_plans import plan, run

PLANS = 1500


def test_plans_at_random_harm_nothing() -> None:
    draw, cpu = random.Random(11), torch.device("cpu")
    came = Counter(run(plan(draw), cpu) for _ in range(PLANS))
    assert came["ran"] > PLANS / 100, came
    assert came["unfit"] > PLANS / 4, came
