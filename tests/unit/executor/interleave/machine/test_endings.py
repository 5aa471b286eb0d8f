"""Endings: finished, evicted and cancelled requests in each state, and skipped modules that are owed."""

from __future__ import annotations

import pytest

from executor.core.ended import Ended
from executor.core.location import Kind, Location
from executor.interleave.machine.events import (
    Arrived,
    Changed,
    Dropped,
    Failure,
    Generated,
    Preempted,
    Refused,
    SkipsChecked,
    StepBegan,
    TurnEnded,
)
from executor.interleave.machine.failures import EVICTED
from executor.interleave.machine.instructions import (
    Cancel,
    CheckSkips,
    Close,
    Fail,
    FindChanged,
    Finish,
    Forget,
    Report,
    Throw,
)
from executor.interleave.machine.machine import Machine
from tests.unit.executor.interleave.machine.situations import (
    DONE,
    FAILED,
    RESULT,
    STOPPED,
    at,
    barrier,
    begin,
    end,
    finish,
    for_step,
    gang,
    machine,
    play,
    reached,
)

GAP = Failure(4, "the layer was skipped and was then to run", "model.layers.1")

# Each state of a block between two steps: how its first turn ended, and whether it is then live.
STATES = {
    "waits for a step": (for_step(1), True),
    "waits for a location of a later step": (at("mlp", 1), True),
    "waits for the result": (RESULT, True),
    "waits at a barrier": (barrier(), True),
    "records": (for_step(1, records=True), True),
    "owes a skip": (for_step(1, owes=True), True),
    "done": (DONE, False),
    "failed": (FAILED, False),
    "stopped": (STOPPED, False),
    "done and records": (TurnEnded(ended=Ended.DONE, records=True), False),
}


def in_state(ends: TurnEnded) -> Machine:
    """Return a machine between two steps whose block "a" is in a state, beside "b" of the same trace."""
    made = gang("a", "b")
    begin(made, "ab", a=ends, b=for_step(1))
    end(made)
    return made


@pytest.mark.parametrize("state", STATES)
def test_cancel(state: str) -> None:
    ends, live = STATES[state]
    made = in_state(ends)
    cancelled = [Cancel("a"), Forget("a")] if live else [Forget("a")]
    assert made.handle(Dropped("t")) == [*cancelled, Cancel("b"), Forget("b")]
    assert made.idle
    assert made.handle(Dropped("t")) == []


def test_cancel_before_the_first_step() -> None:
    made = machine("a")
    assert made.handle(Dropped("t")) == [Cancel("a"), Forget("a")]
    assert made.idle


def test_cancel_of_another_trace_leaves_a_block_alone() -> None:
    made = machine("a")
    assert made.handle(Dropped("u")) == []
    assert begin(made, "a", a=DONE)


def test_cancel_of_a_refused_request() -> None:
    made = Machine()
    made.handle(Refused("a", "t"), Refused("o", "t", joint=True), Arrived(("a", "o")))
    assert not made.idle
    assert made.handle(Dropped("t")) == []
    assert made.idle


@pytest.mark.parametrize("state", STATES)
def test_an_eviction(state: str) -> None:
    """A block that has ended, or only waits for the result, and changed nothing loses nothing."""
    ends, _ = STATES[state]
    done = play(in_state(ends), Preempted("a"))
    if state in ("failed", "stopped"):
        assert done == []
    elif state in ("done", "waits for the result"):
        assert done == [FindChanged(("a",))]
    else:
        assert done == [Fail("a", EVICTED), Report("a", Ended.FAILED)]


@pytest.mark.parametrize("state", ["done", "waits for the result"])
def test_an_eviction_of_a_request_whose_block_changed_something(state: str) -> None:
    changed = Changed(frozenset("a"))
    done = play(in_state(STATES[state][0]), Preempted("a"), {FindChanged: changed})
    assert done == [FindChanged(("a",)), Fail("a", EVICTED), Report("a", Ended.FAILED)]


def test_an_eviction_before_the_first_step() -> None:
    assert play(machine("a"), Preempted("a")) == [Fail("a", EVICTED), Report("a", Ended.FAILED)]


def test_an_eviction_of_a_plain_request() -> None:
    assert machine("a").handle(Preempted("plain")) == []


@pytest.mark.parametrize("state", STATES)
def test_the_end_of_the_generation(state: str) -> None:
    ends, live = STATES[state]
    made = in_state(ends)
    done = finish(made, "a", **({"a": DONE} if live else {}))
    expected = [Finish("a"), Close("a")] if live else [Close("a")]
    assert [do for do in done if not isinstance(do, Report)] == expected
    assert made.blocks.waits("a") == []


def test_the_end_of_a_request_that_never_ran() -> None:
    made = machine("a")
    assert finish(made, "a", a=FAILED) == [Finish("a"), Report("a", Ended.FAILED), Close("a")]
    assert made.idle


def test_the_end_of_a_refused_request() -> None:
    made = Machine()
    made.handle(Refused("a", "t"))
    assert made.handle(Generated("a")) == [Close("a")]
    assert made.idle


def test_a_result_that_is_asked_for_comes_with_the_end() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp"))
    play(made, reached("mlp"), a=RESULT)
    end(made)
    assert finish(made, "a", a=DONE) == [Finish("a"), Close("a")]


def test_a_step_that_is_asked_for_and_never_comes() -> None:
    made = machine("a")
    begin(made, "a", a=for_step(7))
    end(made)
    assert finish(made, "a", a=DONE) == [Finish("a"), Close("a")]


def test_a_location_that_is_never_reached() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp", 9))
    end(made)
    assert finish(made, "a", a=FAILED) == [Finish("a"), Report("a", Ended.FAILED), Close("a")]


def test_the_end_of_one_invoke_leaves_the_others() -> None:
    made = machine("a", "b")
    begin(made, "ab", a=DONE, b=for_step(1))
    end(made)
    finish(made, "a")
    assert begin(made, "b", tokens=1, b=DONE)
    assert not made.idle


# Skips.


def test_a_block_that_owes_no_skip_is_not_asked() -> None:
    made = machine("a")
    begin(made, "a", a=for_step(1))
    assert end(made) == []


def test_a_block_that_owes_a_skip_is_asked_at_the_end_of_each_step() -> None:
    made = machine("a")
    begin(made, "a", a=for_step(1, owes=True))
    assert end(made) == [CheckSkips("a")]


def test_a_gap_in_the_skips_is_raised_and_fails_the_block() -> None:
    made = machine("a")
    begin(made, "a", a=for_step(1, owes=True))
    done = end(made, {CheckSkips: SkipsChecked(GAP)}, a=FAILED)
    assert done == [CheckSkips("a"), Throw("a", GAP), Report("a", Ended.FAILED)]


def test_a_block_that_catches_a_gap_fails_all_the_same() -> None:
    made = machine("a")
    begin(made, "a", a=for_step(1, owes=True))
    done = end(made, {CheckSkips: SkipsChecked(GAP)}, a=for_step(1, owes=True))
    assert done == [CheckSkips("a"), Throw("a", GAP), Fail("a", GAP), Report("a", Ended.FAILED)]


@pytest.mark.parametrize("kind", [None, Kind.RESULT])
def test_a_block_that_will_not_skip_again_fails_in_the_next_step(kind: Kind | None) -> None:
    """A block that has ended, or waits for the result, stays in the steps of its request because it owes a skip."""
    made = machine("a")
    waits = None if kind is None else Location("", kind, 0)
    begin(made, "a", a=TurnEnded(waits=waits, ended=Ended.DONE if kind is None else None, owes=True))
    assert end(made) == []
    assert made.blocks.waits("a") == ["a"]
    turns = {"a": FAILED} if kind is not None else {}
    done = play(made, StepBegan({"a": 1}), {CheckSkips: SkipsChecked(GAP)}, **turns)
    assert done[1:] == [
        CheckSkips("a"),
        Throw("a", GAP) if kind is not None else Fail("a", GAP),
        Report("a", Ended.FAILED),
    ]


def test_a_stopped_block_owes_nothing() -> None:
    made = machine("a")
    begin(made, "a", a=TurnEnded(ended=Ended.STOPPED, owes=True))
    assert end(made) == []
    assert made.blocks.waits("a") == []
