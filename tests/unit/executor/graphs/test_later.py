"""What loops read moves to the requests beside the engine, once, and whatever happens to other requests."""

from __future__ import annotations

import gc
import resource
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from executor.graphs import lines as lines_module
from executor.graphs.landing import _side_by_side
from executor.graphs.later import Later
from executor.graphs.lines import Lines, units_of
from executor.graphs.pieces import Collected, Piece
from executor.graphs.ring import Ring
from executor.graphs.shares import Outgoing, Part, Share
from executor.graphs.tickets import Copier, PlainCopier, Ticket

TOP = 12  # elements of a step
HALF = 8 * TOP  # of which two steps go to the host at a time


@dataclass
class Held:
    """A copier whose copies come when `gate` is open."""

    gate: threading.Event = field(default_factory=threading.Event)

    def before(self) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        return _Coming(self.gate, target, source.clone())


@dataclass
class _Coming:
    gate: threading.Event
    target: torch.Tensor
    source: torch.Tensor

    def done(self) -> bool:
        return self.gate.is_set()

    def wait(self) -> None:
        assert self.gate.wait(20)
        self.target.copy_(self.source)

    def hold(self) -> None:
        pass


class Steps:
    """Steps of requests that read some elements each.

    Args:
        blocks: the most blocks of the host.
        device: where the ring is.
        shares: the size of each request's share, by key.
    """

    def __init__(self, copier: Copier, blocks: int = 2, device: str = "cpu", **shares: int) -> None:
        self.output = torch.zeros(TOP, device=device)
        self.made = 0
        self.later = Later(Ring(self.output, HALF), copier, blocks, self._block)
        self.seen: dict[str, list[torch.Tensor]] = {key: [] for key in shares}
        self._sizes = shares
        self._version = 0
        self._number = 0

    def _block(self, elements: int) -> torch.Tensor:  # [elements]
        self.made += 1
        return torch.full((elements,), float("nan"), pin_memory=self.output.device.type == "cuda")

    def leave(self, key: str) -> None:
        """Run the next steps without a request."""
        self._sizes.pop(key)
        self._version += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            shares, start = {}, 0
            for slot, (_, size) in enumerate(self._sizes.items()):
                shares[slot] = Share(start, size, (Part(0, 0, 1, size),))
                start += size
            outgoing = Outgoing(self._version, start, shares)
            self.later.before(outgoing)
            self.output[:] = torch.arange(TOP, device=self.output.device) + 100.0 * self._number
            self.later._ring.append()
            for key, share in zip(self._sizes, shares.values(), strict=True):
                self.seen[key].append(self.output[share.start : share.start + share.size].clone())
            self.later.after(outgoing, dict(enumerate(self._sizes)))
            self._number += 1

    def check(self, key: str) -> None:
        pieces = self.later.collect(key)
        assert torch.equal(torch.cat([piece.values for piece in pieces]), torch.stack(self.seen[key]).cpu())


def test_the_host_has_two_blocks_however_many_steps_there_are() -> None:
    steps = Steps(PlainCopier(), blocks=8, a=5, b=7)
    for _ in range(50):
        steps.run(7)
        steps.later._mover and steps.later._mover.submit(int).result()  # the thread keeps up
    assert steps.made == 2
    steps.check("a")
    steps.check("b")
    assert steps.later.idle


def test_a_thread_that_does_not_keep_up_gets_more_blocks_up_to_a_bound() -> None:
    copier = Held()
    steps = Steps(copier, blocks=3, a=12)
    threading.Timer(0.5, copier.gate.set).start()
    steps.run(60)
    assert steps.made == 3
    steps.check("a")


def test_a_request_gets_its_own_memory_without_a_copy() -> None:
    steps = Steps(PlainCopier(), a=5, b=7)
    steps.run(30)
    lines = steps.later._lines["b"][0]
    [piece] = steps.later.collect("b")
    assert lines._memory is not None
    start = np.frombuffer(lines._memory, np.uint8).ctypes.data
    assert piece.values.data_ptr() == start and piece.values.is_contiguous()
    assert piece.values.untyped_storage().nbytes() == 30 * 7 * 4
    rows = Collected([piece]).stacked(0, 29)
    assert rows is not None and rows.data_ptr() == start and len(rows) == 29
    before = piece.values.clone()
    steps.run(30)
    assert torch.equal(piece.values, before), "nothing else is written there"


def test_a_request_that_goes_while_its_copy_runs_takes_nothing_along() -> None:
    copier = Held()
    steps = Steps(copier, a=5, b=7)
    steps.run(9)
    gone = weakref.ref(steps.later._lines["a"][0])
    steps.later.drop("a")
    steps.leave("a")
    steps.run(3)
    copier.gate.set()
    steps.run(5)
    steps.check("b")
    assert steps.later.idle
    steps.later.close()
    gc.collect()
    assert gone() is None


def test_a_key_that_comes_again_begins_anew() -> None:
    steps = Steps(PlainCopier(), a=12)
    steps.run(5)
    steps.later.drop("a")
    steps.seen["a"].clear()
    steps._version += 1
    steps.run(3)
    steps.check("a")
    steps.seen["a"].clear()
    steps._version += 1
    steps.run(4)
    steps.check("a")


def test_the_thread_ends_with_the_engine_and_with_what_it_works_for() -> None:
    def threads() -> int:
        return sum(thread.name.startswith("interpose-delivery") for thread in threading.enumerate())

    before = threads()
    closed, left = Steps(PlainCopier(), a=12), Steps(PlainCopier(), a=12)
    for steps in (closed, left):
        steps.run(9)
    assert threads() == before + 2
    closed.later.close()
    assert threads() == before + 1
    closed.later.close()
    mover = left.later._mover
    assert mover is not None
    [thread] = mover._threads
    del left, steps, mover
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@contextmanager
def little_space() -> Iterator[None]:
    """Return a context in which the process may take no more address space, as while a block runs."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_memory_that_is_not_there_for_a_while_is_waited_for() -> None:
    lines = Lines(Share(0, 1 << 20, ()), torch.float32)
    block = units_of(torch.arange(float(1 << 20)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with little_space():
            added = pool.submit(lines.add, block, 0, 1, 1 << 20, lines.share)
            assert not added.done()
        added.result()
    assert torch.equal(lines.values()[0], torch.arange(float(1 << 20)))


def test_a_request_without_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_PATIENCE_SECONDS", 0.01)
    lines, other = Lines(Share(0, 1 << 20, ()), torch.float32), Lines(Share(0, 4, ()), torch.float32)
    block = units_of(torch.zeros(1 << 20))
    other.add(block, 0, 1, 4, other.share)
    with little_space():
        lines.add(block, 0, 1, 1 << 20, lines.share)
        other.add(block, 0, 1, 4, other.share)
    lines.add(block, 0, 1, 1 << 20, lines.share)
    with pytest.raises((OSError, MemoryError)):
        lines.values()
    assert torch.equal(other.values(), torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_lines_grow_and_keep_every_bit(dtype: torch.dtype) -> None:
    size, count = 1000, 37
    values = torch.randn(60 * count, size + 3).to(dtype)
    share = Share(2, size, ())
    lines = Lines(share, dtype)
    for i in range(60):
        part = values[i * count : (i + 1) * count].reshape(-1)
        lines.add(units_of(part), 0, count, size + 3, share)
    assert torch.equal(lines.values(), values[:, 2 : 2 + size])


def test_a_request_that_reads_nothing_has_empty_steps() -> None:
    lines = Lines(Share(0, 0, ()), torch.float32)
    lines.add(units_of(torch.zeros(4)), 0, 2, 2, lines.share)
    assert lines.values().shape == (2, 0)


def test_what_a_step_has_side_by_side_is_read_without_a_copy() -> None:
    parts = tuple(Part(tap, 4 * tap, 1, 4) for tap in range(3))
    share = Share(5, 12, parts)
    lines = Lines(share, torch.float32)
    values = torch.arange(100.0)
    lines.add(units_of(values), 0, 5, 20, share)
    collected = Collected([Piece(lines.share, lines.values())])
    given = [one for tap in range(3) if (one := collected.stacked(tap, 4)) is not None]
    assert [one.shape for one in given] == [(4, 1, 4)] * 3
    rows = _side_by_side(given)
    assert rows is not None and rows.is_contiguous() and rows.data_ptr() == given[0].data_ptr()
    assert torch.equal(rows, torch.stack(given, 1).flatten(0, 1))
    assert torch.equal(rows.flatten(), values.view(5, 20)[:4, 5:17].flatten())
