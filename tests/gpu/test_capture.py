"""Captures beside other work on a GPU, what fails in one, and steps of a toy model that go through all of `executor.graphs`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from executor.graphs.buffers import Outputs
from executor.graphs.cache import GraphCache, Key
from executor.graphs.capture import Captured, CaptureFailed, CudaRecorder, capture
from executor.graphs.dispatch import Dispatcher, Kind, Step
from executor.graphs.kernel import compile_all
from executor.graphs.operations import Code, Tap
from executor.graphs.tickets import Event, SideStream
from tests.unit.executor.graphs.samples import random_tap, same
from tests.unit.executor.graphs.toy import HIDDEN, LAYERS, ROWS, make_toy

GPU = torch.device("cuda")
SIZES = (1, 2, 4, 8, 24)


class ToyDevice:
    """The toy model's graphs, as an engine's worker has them.

    Attributes:
        given, made: the model's input and output, [rows, HIDDEN], where every graph reads and writes.
        spoil: changes a value of a comparison, so that a graph seems wrong.
    """

    def __init__(self) -> None:
        self.toy, self.taps, self.tables = make_toy(torch.bfloat16, GPU)
        compile_all(self.tables, frozenset(range(2, 3 * LAYERS, 3)))
        self.recorder = CudaRecorder(GPU)
        self.given = torch.zeros(ROWS, HIDDEN, device=GPU, dtype=torch.bfloat16)
        self.made = torch.zeros_like(self.given)
        self.spoil = False

    def forward(self, rows: int, sites: frozenset[int]) -> None:
        with torch.inference_mode(), self.taps.hooked(sites):
            self.made[:rows] = self.toy(self.given[:rows].clone())

    def capture(self, key: Key) -> Captured:
        rows = cast(int, key.descriptor)
        return capture(self.recorder, lambda: lambda: self.forward(rows, key.sites), warm=True)

    def replay(self, graph: Any) -> None:
        graph.replay()

    def agrees(self, graph: Any, key: Key) -> bool:
        graph.replay()
        made, read = self.made.clone(), self.tables.output.clone()
        rows = cast(int, key.descriptor)
        self.forward(rows, key.sites)
        if self.spoil:
            made += 1
        return same(made[:rows].cpu(), self.made[:rows].cpu()) and same(read.cpu(), self.tables.output.cpu())


def test_requests_of_random_blocks_get_what_eager_steps_give_them() -> None:
    device, eager = ToyDevice(), ToyDevice()
    eager.toy.load_state_dict(device.toy.state_dict())
    dispatcher = Dispatcher(device, GraphCache(3, 1 << 30, Event.now), frozenset({2, 5}), prompts=True)
    outputs, plain = (Outputs(one.tables, SideStream(GPU), 1 << 18, 1 << 20) for one in (device, eager))
    rng = random.Random(7)
    running: dict[int, list[Any]] = {}  # slot: key, rows of the prompt, step, last step, taps
    serial, kinds = 0, set()
    while serial < 40 or running:
        for slot in set(range(6)) - set(running):
            if serial < 40 and rng.random() < 0.3:
                rows = rng.randint(1, 3)
                taps = [random_tap(rng, device.tables.widths, torch.bfloat16, rows, form=True) for _ in range(4)]
                for one in (device, eager):
                    one.tables.join(slot, "a", taps, rows)
                running[slot] = [f"r{serial}", rows, 0, rng.randint(2, 7), taps]
                serial += 1
        batch = [(slot, one[1] if one[2] == 0 else 1) for slot, one in running.items() if rng.random() < 0.9]
        total = sum(count for _, count in batch)
        if not total:
            continue
        size = next(one for one in SIZES if one >= total)
        steps = {slot: running[slot][2] for slot, _ in batch}
        keys = {slot: running[slot][0] for slot, _ in batch}
        values = torch.randn(size, HIDDEN, device=GPU, dtype=torch.bfloat16)
        results = []
        for one, delivery in ((device, outputs), (eager, plain)):
            left = one.tables.begin_step(batch, steps, size)
            delivery.before(left)
            if one is device:
                need = Step(size, prompt=any(n > 1 for _, n in batch), sites=one.tables.sites)
                decision = dispatcher.decide(need)  # A capture writes dummy inputs, so it comes before the inputs.
            one.given[:size] = values
            if one is device and decision.entry is not None:
                dispatcher.run(decision.entry)
            else:
                one.forward(size, one.tables.sites)
            delivery.ring.append()
            delivery.after(left, keys)
            results.append(one.made[:size].clone())
        kinds.add(decision.kind)
        assert same(results[0].cpu(), results[1].cpu())
        for slot, _ in batch:
            running[slot][2] += 1
            if running[slot][2] == running[slot][3]:
                key, _, _, _, taps = running.pop(slot)
                for one in (device, eager):
                    one.tables.leave(slot)
                got, expected = outputs.collect(key), plain.collect(key)
                for i in range(len(taps)):
                    mine, other = got.steps_of(i), expected.steps_of(i)
                    assert len(mine) == len(other)
                    assert all(same(x, y) for x, y in zip(mine, other, strict=True))
    assert outputs.idle and plain.idle and Kind.GRAPH in kinds
    counts = dispatcher.counts
    assert counts.mismatched == counts.failed == 0 and counts.captured > 3


def test_a_graph_with_other_values_is_dropped() -> None:
    device = ToyDevice()
    device.spoil = True
    dispatcher = Dispatcher(device, GraphCache(3, 1 << 30))
    device.tables.join(0, "a", [Tap(2, Code.ADD, (0, HIDDEN), number=1.0)], 1)
    device.tables.begin_step([(0, 1)], {0: 1}, 1)
    decision = dispatcher.decide(Step(1, sites=device.tables.sites))
    assert decision.entry is not None
    dispatcher.run(decision.entry)
    assert dispatcher.counts.mismatched == 1
    assert dispatcher.decide(Step(1, sites=device.tables.sites)).kind is Kind.EAGER


def too_large(device: ToyDevice) -> None:
    torch.empty(1 << 50, device=GPU)


def looks(device: ToyDevice) -> None:
    device.given.sum().item()


@pytest.mark.parametrize(("forward", "out_of_memory"), [(too_large, True), (looks, False)])
def test_a_capture_that_fails_leaves_the_device_as_it_was(
    forward: Callable[[ToyDevice], None], out_of_memory: bool
) -> None:
    device = ToyDevice()
    stream = torch.cuda.current_stream()
    with pytest.raises(CaptureFailed) as caught:
        capture(device.recorder, lambda: lambda: forward(device), warm=False)
    assert caught.value.out_of_memory is out_of_memory
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    torch.manual_seed(3)
    first = torch.rand(3, device=GPU)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(3, device=GPU))
    captured = device.capture(Key(4, frozenset({2})))
    device.given.normal_()
    captured.graph.replay()
    got = device.made[:4].clone()
    device.forward(4, frozenset())
    assert torch.equal(got, device.made[:4])


def test_captures_beside_a_busy_thread() -> None:
    device, stop, wrong, rounds = ToyDevice(), threading.Event(), [], 0

    def work() -> None:
        nonlocal rounds
        try:
            stream, x = torch.cuda.Stream(), torch.ones(1 << 16, device=GPU)
            while not stop.is_set():
                with torch.cuda.stream(stream):
                    event = torch.cuda.Event(blocking=True)
                    x.to("cpu", non_blocking=True)
                    torch.empty(1000 + 4096 * (rounds % 900), device=GPU)
                    event.record(stream)
                event.synchronize()
                rounds += 1
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(12):
            device.capture(Key(8, frozenset(range(9)))).graph.replay()
        torch.cuda.synchronize()
    finally:
        stop.set()
        thread.join()
    assert not wrong and rounds
