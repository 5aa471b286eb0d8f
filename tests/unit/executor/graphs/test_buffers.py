"""What taps read arrives whole and in order, whatever joins, leaves, opens and closes meanwhile."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.graphs import reference
from executor.graphs.buffers import Delivery, Outputs
from executor.graphs.operations import ALL, Code, Tap
from executor.graphs.pieces import Collected
from executor.graphs.shares import Outgoing, Share
from executor.graphs.tables import Tables
from executor.graphs.tickets import Copier, PlainCopier, Ticket
from tests.unit.executor.graphs.samples import CPU, LIMITS

WIDTHS = (4, 6)


@dataclass
class Slow:
    """A copier whose copies are made when they are waited for, or when the next step must not go on before."""

    pending: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def before(self) -> None:
        self.flush()

    def flush(self) -> None:
        with self.lock:
            for target, source in self.pending:
                target.copy_(source)
            self.pending.clear()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        with self.lock:
            self.pending.append((target, source))
        return _Late(self)


@dataclass
class _Late:
    copier: Slow

    def done(self) -> bool:
        return not self.copier.pending

    def wait(self) -> None:
        self.copier.flush()

    def hold(self) -> None:
        self.copier.flush()


def make(copier: Copier, blocks: int = 2) -> tuple[Tables, Outputs]:
    tables = Tables(WIDTHS, 4, 32, torch.float32, CPU, LIMITS)
    outputs = Outputs(tables, copier, 2 * 4 * tables.split, 2 * blocks * 4 * tables.split)
    return tables, outputs


@dataclass
class Request:
    """A request of the test's engine, with what each of its taps read."""

    key: str
    taps: list[Tap]
    rows: int
    last: int
    step: int = 0
    seen: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def some_taps(rng: random.Random) -> list[Tap]:
    found = []
    for _ in range(rng.randint(1, 4)):
        site = rng.randrange(2)
        start = rng.randrange(WIDTHS[site])
        begin = rng.randrange(4)
        steps = (begin, rng.randint(begin + 1, 8)) if rng.random() < 0.5 else (0, ALL)
        rows = (1, 3) if rng.random() < 0.2 else (0, ALL)
        found.append(Tap(site, Code.READ, (start, rng.randint(start + 1, WIDTHS[site])), rows=rows, steps=steps))
    return found


@given(seed=st.integers(0, 1 << 30), slow=st.booleans())
def test_all_that_was_read_arrives_in_order(seed: int, slow: bool) -> None:
    rng = random.Random(seed)
    copier = Slow() if slow else PlainCopier()
    tables, outputs = make(copier)
    running: dict[int, Request] = {}
    serial, ended = 0, 0
    while serial < 8 or running:
        for slot in set(range(4)) - set(running):
            if serial < 8 and rng.random() < 0.5:
                running[slot] = Request(f"r{serial}", some_taps(rng), rng.randint(1, 4), rng.randint(1, 9))
                tables.join(slot, "a", running[slot].taps, running[slot].rows)
                serial += 1
        batch = [slot for slot in running if rng.random() < 0.8]
        if batch:
            rng.shuffle(batch)
            one_step(tables, outputs, running, batch)
        for slot in [slot for slot, request in running.items() if request.step == request.last]:
            request = running.pop(slot)
            tables.leave(slot)
            check(outputs.collect(request.key), request)
            ended += 1
    assert ended == 8 and outputs.idle


def one_step(tables: Tables, outputs: Outputs, running: dict[int, Request], batch: list[int]) -> None:
    spans = [(slot, running[slot].rows if running[slot].step == 0 else 1) for slot in batch]
    total = sum(count for _, count in spans)
    outgoing = tables.begin_step(spans, {slot: running[slot].step for slot in batch}, total)
    outputs.before(outgoing)
    written = tables.output if outgoing[1].shares else tables.output[: tables.split]
    written.fill_(float("nan"))  # what the step before left there is gone
    values = [torch.randn(total, width) for width in WIDTHS]
    for site, value in enumerate(values):
        reference.run_taps(tables, site, value)
    outputs.ring.append()
    outputs.after(outgoing, {slot: running[slot].key for slot in batch})
    row = 0
    for slot, count in spans:
        request = running[slot]
        for i, tap in enumerate(request.taps):
            mine = values[tap.site][row : row + count, tap.columns[0] : tap.columns[1]][tap.rows[0] : tap.rows[1]]
            if tap.steps[0] <= request.step < tap.steps[1] and len(mine):
                request.seen.setdefault(i, []).append(mine)
        request.step += 1
        row += count


def check(got: Collected, request: Request) -> None:
    for i in range(len(request.taps)):
        expected = request.seen.get(i, [])
        steps = got.steps_of(i)
        assert len(steps) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(steps, expected, strict=True))
        stacked = got.stacked(i, most=3)
        if len({one.shape for one in expected}) == 1:
            assert stacked is not None and torch.equal(stacked, torch.stack(expected[:3]))
        else:
            assert stacked is None


def delivery(copier: Copier, blocks: int = 1, made: list[int] | None = None) -> Delivery:
    def host(elements: int) -> torch.Tensor:
        if made is not None:
            made.append(elements)
        return torch.empty(elements)

    return Delivery(torch.arange(4.0), copier, 8, blocks, host)


def outgoing(version: int, **shares: tuple[int, int]) -> tuple[Outgoing, dict[int, str]]:
    """Return what a step leaves for requests by name, and the requests of the slots."""
    found = {i: Share(start, size, ()) for i, (start, size) in enumerate(shares.values())}
    top = max((start + size for start, size in shares.values()), default=0)
    return Outgoing(version, top, found), dict(enumerate(shares))


def test_memory_of_the_host_is_bounded_and_older_steps_move_out() -> None:
    made: list[int] = []
    one = delivery(PlainCopier(), blocks=1, made=made)
    for step in range(7):
        one._source.copy_(torch.arange(4.0) + 10 * step)
        one.after(*outgoing(1, a=(0, 2), b=(2, 2)))
    assert made == [8]
    got = torch.cat([piece.values for piece in one.collect("b")])
    assert torch.equal(got, torch.tensor([[2.0 + 10 * k, 3.0 + 10 * k] for k in range(7)]))
    one.drop("a")
    assert one.idle


def test_a_step_without_reads_copies_nothing() -> None:
    copier = Slow()
    one = delivery(copier)
    one.after(*outgoing(1))
    assert one.idle and not copier.pending


def test_memory_is_not_used_again_before_its_copy_is_over() -> None:
    copier = Slow()
    one = delivery(copier)
    one.after(*outgoing(1, a=(0, 4)))
    assert copier.pending
    one.drop("a")
    assert not copier.pending


def test_a_collected_value_does_not_change_later() -> None:
    one = delivery(PlainCopier())
    one.after(*outgoing(1, a=(0, 2), b=(2, 2)))
    [piece] = one.collect("a")
    before = piece.values.clone()
    one._source.fill_(7)
    for _ in range(5):
        one.after(*outgoing(2, b=(0, 4)))
    assert torch.equal(piece.values, before)


def test_an_unknown_request_has_nothing() -> None:
    assert delivery(PlainCopier()).collect("a") == []


def test_a_block_smaller_than_the_area_is_refused() -> None:
    with pytest.raises(ValueError, match="area of 4"):
        Delivery(torch.zeros(4), PlainCopier(), 3, 1, torch.empty)


@given(seed=st.integers(0, 1 << 30), slow=st.booleans())
def test_steps_that_repeat_the_last_one_arrive_too(seed: int, slow: bool) -> None:
    rng = random.Random(seed)
    tables = Tables(WIDTHS, 4, 32, torch.float32, CPU, LIMITS)
    outputs = Outputs(tables, Slow() if slow else PlainCopier(), 2 * 4 * tables.split, 4 * 4 * tables.split)
    keys = {slot: f"r{slot}" for slot in range(rng.randint(1, 3))}
    seen: dict[str, list[torch.Tensor]] = {key: [] for key in keys.values()}
    for slot in keys:
        tables.join(slot, "a", [Tap(0, Code.READ, (slot, 4))], 1)
    batch, step = [(slot, 1) for slot in keys], 0

    def ran() -> None:
        nonlocal step
        value = torch.randn(len(keys), WIDTHS[0])
        reference.run_taps(tables, 0, value)
        outputs.ring.append()
        for slot, key in keys.items():
            seen[key].append(value[slot : slot + 1, slot:4])
        step += 1

    for _ in range(rng.randint(1, 6)):
        outgoing = tables.begin_step(batch, dict.fromkeys(keys, step), len(keys))
        outputs.before(outgoing)
        ran()
        outputs.after(outgoing, keys)
        repeated = rng.randint(0, min(outputs.room(outgoing), 200))
        for _ in range(repeated):
            ran()
        outputs.repeat(repeated)
        if rng.random() < 0.3:  # the first half of the ring may end before its room does
            outputs._later._turn()
    for key in keys.values():
        got = outputs.collect(key).stacked(0)
        assert got is not None and torch.equal(got, torch.stack(seen[key]))
    assert outputs.idle
