"""Puts the taps of several plans of one loop together, each tap once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from executor.graphs.operations import Tap


def merged(parts: Sequence[Sequence[Tap]]) -> tuple[tuple[Tap, ...], list[tuple[int, ...]]]:
    """Return the taps of consecutive steps, and for each part the numbers of its taps.

    Two parts that are the same operations one by one share the taps that have no vector. So a loop from the prompt on has no more
    taps than it has in a later step.

    Args:
        parts: the taps of each part, whose steps follow each other.
    """
    if len(parts) == 2 and len(parts[0]) == len(parts[1]) and all(map(_follow, *parts)):
        taps: list[Tap] = []
        numbers: list[tuple[int, int]] = []
        for one, other in zip(*parts, strict=True):
            if _same(one, other):
                numbers.append((len(taps), len(taps)))
                taps.append(replace(one, steps=(one.steps[0], other.steps[1])))
            else:
                numbers.append((len(taps), len(taps) + 1))
                taps += (one, other)
        return tuple(taps), [tuple(pair[i] for pair in numbers) for i in (0, 1)]
    found: list[Tap] = []
    each: list[tuple[int, ...]] = []
    for part in parts:
        each.append(tuple(range(len(found), len(found) + len(part))))
        found += part
    return tuple(found), each


def _follow(one: Tap, other: Tap) -> bool:
    return one.steps[1] == other.steps[0] and one.site == other.site


def _same(one: Tap, other: Tap) -> bool:
    """Return whether two taps are the same operation, in other steps."""
    if any(tap.vector is not None or tap.direction is not None for tap in (one, other)):
        return False
    return _content(one) == _content(other)


def _content(tap: Tap) -> tuple[object, ...]:
    """Return what a tap without a vector does, whatever its steps."""
    return tap.site, tap.code, tap.columns, tap.rows, tap.number.hex(), tap.coefficients, tap.low, tap.high
