"""Rounds: a block's turn is bounded whatever the block before it did, and the process gets its own state back."""

from __future__ import annotations

import gc
import resource
import signal
import time

import pytest
import torch

from executor.block.budget import Budget
from executor.core.errors import BudgetExceeded
from tests.unit.executor.block.parts import failed_with, greenlet_block


def always() -> bool:
    return True


def test_each_turn_has_its_timer_and_its_limit_whatever_the_turn_before_did() -> None:
    budget = Budget(60.0, 1 << 34)
    budget.begin_step()
    remaining = signal.getitimer(signal.ITIMER_REAL)[0]  # of the test's own time limit
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    budget.begin_round()
    budget.arm(always, 0.0)
    bounded = resource.getrlimit(resource.RLIMIT_AS)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, limits[1]))
    gc.enable()
    budget.disarm()
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    budget.arm(always, 0.0)
    assert signal.getitimer(signal.ITIMER_REAL)[1] > 0
    assert signal.getsignal(signal.SIGALRM) not in (handler, signal.SIG_IGN)
    assert resource.getrlimit(resource.RLIMIT_AS) == bounded != limits
    assert not gc.isenabled()
    budget.disarm()
    budget.end_round()
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 0.0
    assert remaining - 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= remaining
    assert signal.getsignal(signal.SIGALRM) is handler
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert gc.isenabled()


def test_a_tick_between_the_turns_of_a_round_raises_nothing() -> None:
    budget = Budget(0.0, 1 << 34)
    budget.begin_step()
    budget.begin_round()
    budget.arm(lambda: False, 0.0)
    budget.disarm()
    ends = time.monotonic() + 0.2
    while time.monotonic() < ends:
        pass
    with pytest.raises(BudgetExceeded):
        budget.run(lambda: time.sleep(5), 0.0, b"")
    budget.end_round()


def test_a_block_that_never_parks_is_ended_in_a_round_and_the_next_runs() -> None:
    budget = Budget(0.2, 1 << 34)
    first = greenlet_block("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nread(0)", budget=budget)
    second = greenlet_block("while True: pass", budget=budget)
    third = greenlet_block("read(1)", budget=budget)
    budget.begin_step()
    budget.begin_round()
    for mediator in (first, second, third):
        mediator.start()
    budget.end_round()
    assert "ran longer" in failed_with(second).message
    for mediator in (first, third):
        assert mediator.state.waits.location is not None
        mediator.cancel()


def test_what_a_block_changes_in_the_process_is_not_seen_by_the_next() -> None:
    seen: list[object] = []
    budget = Budget(60.0, 1 << 34)
    names = {"seen": seen, "budget": budget}
    first = greenlet_block("torch.set_default_dtype(torch.float64)\nread(0)", **names)
    second = greenlet_block("seen.append(torch.get_default_dtype())\nread(0)", **names)
    budget.begin_step()
    budget.begin_round()
    for mediator in (first, second):
        mediator.start()
    budget.end_round()
    assert torch.get_default_dtype() is torch.float32
    assert seen == [torch.float32]
    for mediator in (first, second):
        mediator.cancel()
