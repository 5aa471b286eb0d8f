"""Taps of a prompt and of the steps after it share places where they are the same."""

from __future__ import annotations

from dataclasses import replace

import torch

from executor.graphs.merge import merged
from executor.graphs.operations import ALL, Code, Tap

READ = Tap(0, Code.READ, (0, 4))
SCALE = Tap(0, Code.MULTIPLY, (0, 4), number=0.5)


def parts(*pairs: tuple[Tap, Tap]) -> list[list[Tap]]:
    return [[replace(one, steps=(0, 1)) for one, _ in pairs], [replace(other, steps=(1, 9)) for _, other in pairs]]


def test_the_same_operations_are_there_once() -> None:
    taps, numbers = merged(parts((READ, READ), (SCALE, SCALE)))
    assert [tap.steps for tap in taps] == [(0, 9), (0, 9)] and numbers == [(0, 1), (0, 1)]


def test_what_differs_keeps_its_own_steps() -> None:
    vector = Tap(0, Code.ADD, (0, 4), vector=torch.ones(4))
    last = replace(READ, rows=(4, 5))
    taps, numbers = merged(
        parts((READ, READ), (vector, vector), (SCALE, replace(SCALE, number=-0.5)), (last, READ), (READ, READ))
    )
    assert numbers == [(0, 1, 3, 5, 7), (0, 2, 4, 6, 7)]
    assert [tap.steps for tap in taps] == [(0, 9), *[(0, 1), (1, 9)] * 3, (0, 9)]
    assert merged(parts((SCALE, replace(SCALE, number=-0.0)), (replace(SCALE, number=0.0), SCALE)))[1] == [
        (0, 2),
        (1, 3),
    ]


def test_parts_of_other_forms_follow_each_other() -> None:
    apart = [replace(READ, steps=(0, 1))], [replace(READ, steps=(1, ALL)), replace(SCALE, steps=(1, ALL))]
    taps, numbers = merged(apart)
    assert len(taps) == 3 and numbers == [(0,), (1, 2)]
    other = [replace(READ, steps=(0, 1))], [replace(READ, site=1, steps=(1, ALL))]
    assert merged(other)[1] == [(0,), (1,)] and merged([]) == ((), [])
