"""Tables with random taps, for the tests of the reference and of the kernel."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from executor.graphs.limits import GraphLimits
from executor.graphs.operations import ALL, Code, Tap
from executor.graphs.shares import Outgoing
from executor.graphs.tables import Tables

CPU = torch.device("cpu")
LIMITS = GraphLimits(
    taps=24, bank_bytes=1 << 16, bank_share=1.0, step_bytes=1 << 16, prompt_bytes=1 << 18, host_bytes=1 << 20
)
EXACT = (Code.READ, Code.READ, Code.ADD, Code.MULTIPLY, Code.SET, Code.CLAMP)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits; every NaN is the same."""
    zeros = torch.equal(torch.signbit(one) & (one == 0), torch.signbit(other) & (other == 0))
    return one.dtype == other.dtype and bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)) and zeros


def make_tables(
    widths: tuple[int, ...] = (12, 12, 7), dtype: torch.dtype = torch.bfloat16, device: torch.device = CPU
) -> Tables:
    return Tables(widths, slots=6, rows=40, dtype=dtype, device=device, limits=LIMITS)


def numbers(rng: random.Random, *shape: int, dtype: torch.dtype, special: bool = True) -> torch.Tensor:
    """Return numbers of all magnitudes, [*shape]; some are zeros of both signs, infinite or NaN."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    made = torch.randn(shape, generator=generator) * 10.0 ** rng.randrange(-3, 4)
    if special:
        flat = made.view(-1)
        for value in (0.0, -0.0, float("inf"), float("-inf"), float("nan")):
            flat[rng.randrange(flat.numel())] = value
    return made.to(dtype)


def random_tap(rng: random.Random, widths: tuple[int, ...], dtype: torch.dtype, rows: int, form: bool) -> Tap:
    site = rng.randrange(len(widths))
    start = rng.randrange(widths[site])
    columns = (start, rng.randint(start + 1, widths[site])) if rng.random() < 0.6 else (0, widths[site])
    width = columns[1] - columns[0]
    first = rng.randrange(rows)
    span = (first, rng.randint(first + 1, rows)) if rng.random() < 0.4 else (0, ALL)
    opened = rng.randrange(3)
    steps = (opened, rng.randint(opened + 1, 5)) if rng.random() < 0.4 else (0, ALL)
    code = Code.FORM if form and rng.random() < 0.5 else rng.choice(EXACT)
    tap: dict[str, Any] = {"site": site, "code": code, "columns": columns, "rows": span, "steps": steps}
    if code is Code.CLAMP:
        low, high = sorted((rng.uniform(-2, 2), rng.uniform(-2, 2)))
        return Tap(**tap, low=low, high=high)
    if code is Code.FORM:
        vector, direction = (
            torch.nn.functional.normalize(numbers(rng, width, dtype=torch.float32, special=False), dim=0)
            for _ in range(2)
        )
        kinds = ((0.5, 0, 0, 0), (0, 0.25, 0, 0), (0, 0, -1.0, 0), (0, 0, 0, 1.0), (0.5, 0.5, 0.5, 0.5))
        return Tap(
            **tap, vector=vector, direction=direction, coefficients=rng.choice(kinds), low=-rng.random(), high=0.5
        )
    if code is Code.READ or rng.random() < 0.4:
        return Tap(**tap, number=rng.uniform(-3, 3))
    each = span[1] != ALL and rng.random() < 0.5
    shape = (span[1] - span[0], width) if each else (width,)
    wide = dtype != torch.float32 and rng.random() < 0.4
    return Tap(**tap, vector=numbers(rng, *shape, dtype=torch.float32 if wide else dtype, special=not form))


@dataclass
class Sample:
    """A step with random taps.

    Attributes:
        tables: begun with the step.
        taps: by slot.
        batch: slots and rows.
        steps: by slot.
        padded: the rows of the tensors.
        outgoing: what `begin_step` returned.
    """

    tables: Tables
    taps: dict[int, list[Tap]]
    batch: list[tuple[int, int]]
    steps: dict[int, int]
    padded: int
    outgoing: tuple[Outgoing, Outgoing]


def sample(seed: int, dtype: torch.dtype, device: torch.device = CPU, form: bool = False) -> Sample:
    """Return a step of some requests, plain requests among them."""
    rng = random.Random(seed)
    tables = make_tables(dtype=dtype, device=device)
    slots = rng.sample(range(6), rng.randint(1, 6))
    decode = rng.random() < 0.4
    batch = [(slot, 1 if decode or rng.random() < 0.4 else rng.randint(2, 5)) for slot in slots]
    taps: dict[int, list[Tap]] = {}
    for slot, count in batch:
        if rng.random() < 0.75:
            taps[slot] = [random_tap(rng, tables.widths, dtype, count, form) for _ in range(rng.randint(1, 10))]
            tables.join(slot, f"tenant {slot % 2}", taps[slot], count)
    steps = {slot: rng.randrange(4) if count == 1 else 0 for slot, count in batch}
    padded = sum(count for _, count in batch) + rng.randrange(4)
    return Sample(tables, taps, batch, steps, padded, tables.begin_step(batch, steps, padded))
