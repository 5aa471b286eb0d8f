"""Universal taps on a GPU: the kernel against the reference and torch, and one captured graph for any mixture of requests."""

from __future__ import annotations

import random

import pytest
import torch

from executor.graphs import kernel
from executor.graphs.operations import Code
from tests.unit.executor.graphs.interpreted import run_both
from tests.unit.executor.graphs.samples import make_tables, numbers, random_tap, same
from tests.unit.executor.graphs.toy import HIDDEN, LAYERS, make_toy

GPU = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", [False, True])
def test_elementwise_operations_have_the_bits_of_the_reference(dtype: torch.dtype, pair: bool) -> None:
    for seed in range(40):
        for got, expected in run_both(seed, dtype, pair, form=False, device=GPU):
            # A number that is added is rounded first on the CPU alone.
            assert same(got, expected) or dtype != torch.float32, seed


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_operations_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        tables = make_tables((300,), dtype, GPU)
        taps = [random_tap(rng, (300,), dtype, 3, form=False) for _ in range(6)]
        tables.join(0, "", taps, 3)
        _, prompt = tables.begin_step([(0, 3)], {0: 0}, 3)
        value = numbers(rng, 3, 300, dtype=dtype).to(GPU)
        expected, reads = value.clone(), {}
        for i, tap in enumerate(taps):
            x = expected[tap.rows[0] : tap.rows[1], tap.columns[0] : tap.columns[1]]
            operand = tap.number if tap.vector is None else tap.vector.to(GPU)
            if tap.steps[0]:
                continue
            if tap.code is Code.READ:
                reads[i] = x.clone()
            elif tap.code is Code.ADD:
                x += operand
            elif tap.code is Code.MULTIPLY:
                x *= operand
            elif tap.code is Code.SET:
                x[:] = operand
            else:
                x.clamp_(tap.low, tap.high)
        kernel.run_taps(tables, 0, value)
        assert same(value.cpu(), expected.cpu()), (seed, taps)
        got = {}
        for share in prompt.shares.values():
            for part in share.parts:
                start = tables.split + share.start + part.at
                got[part.tap] = tables.output[start : start + part.rows * part.width].view(part.rows, part.width)
        assert got.keys() == reads.keys()
        assert all(same(got[i].cpu(), reads[i].cpu()) for i in got)


def test_forms_agree_within_the_rounding_of_a_sum() -> None:
    for seed in range(40):
        for got, expected in run_both(seed, torch.float32, bool(seed % 2), form=True, device=GPU):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_one_graph_serves_any_mixture_of_requests() -> None:
    toy, taps, tables = make_toy(torch.bfloat16, GPU)
    kernel.compile_all(tables, frozenset(range(2, 3 * LAYERS, 3)))
    x = torch.randn(6, HIDDEN, device=GPU, dtype=torch.bfloat16)
    given, made = torch.zeros_like(x), torch.zeros_like(x)
    numbers_ = range(len(taps.sites))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), taps.hooked(numbers_):
        made.copy_(toy(given))
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with taps.hooked(numbers_), torch.cuda.graph(graph, stream=stream):
        made.copy_(toy(given))
    for seed in range(30):
        rng = random.Random(seed)
        slots = rng.sample(range(6), rng.randint(1, 5))
        joined = [slot for slot in slots if rng.random() < 0.7]
        for slot in joined:
            mine = [random_tap(rng, tables.widths, torch.bfloat16, 1, form=True) for _ in range(5)]
            tables.join(slot, "a", mine, 1)
        batch = [(slot, 1) for slot in slots]
        x = torch.randn_like(x)
        given.copy_(x)
        steps = dict.fromkeys(slots, 0)
        tables.output.zero_()
        tables.begin_step(batch, steps, 6)
        graph.replay()
        got, read = made.clone(), tables.output.clone()
        tables.output.zero_()
        with taps.hooked(tables.sites):
            expected = toy(x.clone())
        assert same(got.cpu(), expected.cpu())
        assert same(read.cpu(), tables.output.cpu())
        plain = toy(x.clone())
        untouched = [i for i, slot in enumerate(slots) if slot not in joined] + list(range(len(slots), 6))
        assert torch.equal(got[untouched], plain[untouched])
        for slot in joined:
            tables.leave(slot)
