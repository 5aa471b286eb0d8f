"""Standing edits: blocks that run in a request, before its own block, and end with it."""

from __future__ import annotations

from executor.core.ended import Ended
from executor.interleave.machine.events import Admitted, Changed, Dropped, Failure, Generated, Preempted, TurnEnded
from executor.interleave.machine.failures import EVICTED, not_reached, too_long
from executor.interleave.machine.instructions import (
    BeginStep,
    Cancel,
    Close,
    Fail,
    FailForEdit,
    FindChanged,
    Finish,
    Forget,
    Hook,
    Miss,
    Record,
    Report,
    Serve,
    Start,
    Throw,
)
from executor.interleave.machine.machine import Machine
from tests.unit.executor.interleave.machine.situations import (
    DONE,
    FAILED,
    PROMPT,
    RESULT,
    STOPPED,
    at,
    begin,
    end,
    finish,
    for_step,
    location,
    play,
    reached,
    with_edits,
)

EA = ["e", "a"]


def test_edits_wait_for_a_step_before_the_request_does() -> None:
    assert with_edits("e", "f").blocks.waits("a") == ["e", "f", "a"]


def test_edits_are_served_before_the_block_in_their_order() -> None:
    made = with_edits("e", "f")
    begin(made, ["a", "f", "e"], a=at("mlp"), e=at("mlp"), f=at("mlp"))
    assert play(made, reached("mlp"), a=at("x"), e=at("x"), f=at("x"))[:3] == [Serve("e"), Serve("f"), Serve("a")]


def test_edits_of_two_requests_are_served_request_by_request() -> None:
    made = with_edits("e")
    made.handle(Admitted("f", "f", 0, 1, PROMPT, owner="b", rank=-1), Admitted("b", "u", 0, 1, PROMPT))
    begin(made, ["f", "b", "e", "a"], f=at("mlp"), b=at("mlp"), e=at("mlp"), a=at("mlp"))
    done = play(made, reached("mlp"), f=at("x"), b=at("x"), e=at("x"), a=at("x"))
    assert done[:4] == [Serve("e"), Serve("a"), Serve("f"), Serve("b")]


def test_an_edit_that_fails_before_the_block_is_served_fails_the_request() -> None:
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=at("norm"))
    done = play(made, reached("mlp"), e=FAILED)
    assert done == [Serve("e"), FailForEdit("a", "e"), Report("a", Ended.FAILED)]
    assert play(made, reached("norm")) == []


def test_an_edit_that_fails_when_it_starts_fails_the_request() -> None:
    made = with_edits("e")
    done = begin(made, EA, e=FAILED, a=at("mlp"))
    assert done == [
        BeginStep(("e", "a")),
        Start("e", 3),
        Start("a", 3),
        FailForEdit("a", "e"),
        Report("a", Ended.FAILED),
    ]


def test_an_edit_that_fails_beside_the_block_fails_the_request() -> None:
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=at("mlp"))
    done = play(made, reached("mlp"), e=FAILED, a=at("x"))
    assert done == [Serve("e"), Serve("a"), FailForEdit("a", "e"), Report("a", Ended.FAILED)]


def test_an_edit_that_fails_beside_a_block_that_fails_leaves_it_its_error() -> None:
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=at("mlp"))
    done = play(made, reached("mlp"), e=FAILED, a=FAILED)
    assert done == [Serve("e"), Serve("a"), Report("a", Ended.FAILED)]


def test_an_edit_that_fails_after_the_block_has_ended_fails_the_request() -> None:
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=DONE)
    assert made.blocks.waits("a") == ["e"]
    assert play(made, reached("mlp"), e=FAILED) == [Serve("e"), FailForEdit("a", "e"), Report("a", Ended.FAILED)]


def test_an_edit_that_fails_at_the_end_of_the_request_fails_it() -> None:
    made = with_edits("e")
    begin(made, EA, e=for_step(1), a=for_step(1))
    end(made)
    assert finish(made, "a", e=FAILED) == [
        Finish("e"),
        FailForEdit("a", "e"),
        Report("a", Ended.FAILED),
        Forget("e"),
        Close("a"),
    ]


def test_an_edit_that_fails_ends_the_edits_beside_it() -> None:
    made = with_edits("e", "f")
    begin(made, ["e", "f", "a"], e=at("mlp"), f=at("norm"), a=at("norm"))
    done = play(made, reached("mlp"), e=FAILED)
    assert done == [Serve("e"), FailForEdit("a", "e"), Cancel("f"), Report("a", Ended.FAILED)]
    assert made.blocks.waits("a") == []


def test_an_edit_whose_location_was_not_reached_fails_the_request() -> None:
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=for_step(1))
    done = end(made, e=FAILED)
    assert done == [Miss("e", not_reached(location("mlp"))), FailForEdit("a", "e"), Report("a", Ended.FAILED)]


def test_an_edit_whose_change_does_not_fit_fails_the_request() -> None:
    why = Failure(4, "does not fit")
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=at("norm"))
    done = play(made, reached("mlp"), e=[at("x", misfit=why), FAILED])
    assert done == [Serve("e"), Throw("e", why), FailForEdit("a", "e"), Report("a", Ended.FAILED)]


def test_an_ended_edit_whose_change_does_not_fit_fails_the_request() -> None:
    why = Failure(4, "does not fit")
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=at("norm"))
    done = play(made, reached("mlp"), e=TurnEnded(ended=Ended.DONE, misfit=why))
    assert done == [Serve("e"), Fail("e", why), FailForEdit("a", "e"), Report("a", Ended.FAILED)]


def test_a_prompt_that_is_cut_fails_request_and_edit_once() -> None:
    made = with_edits("e")
    done = begin(made, EA, tokens=2)
    assert done == [BeginStep(("e", "a")), Fail("e", too_long(3)), FailForEdit("a", "e"), Report("a", Ended.FAILED)]


def test_a_request_becomes_plain_when_edits_and_block_need_no_step_and_changed_nothing() -> None:
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=RESULT)
    assert play(made, reached("mlp"), e=DONE) == [Serve("e"), FindChanged(("a", "e")), Report("a", Ended.READ_ONLY)]


def test_a_request_whose_edit_changed_something_does_not_become_plain() -> None:
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=DONE)
    done = play(made, reached("mlp"), {FindChanged: Changed(frozenset("e"))}, e=DONE)
    assert done == [Serve("e"), FindChanged(("a", "e"))]


def test_edits_run_to_their_ends_before_the_block() -> None:
    made = with_edits("e", "f")
    begin(made, ["e", "f", "a"], e=for_step(1), f=for_step(1), a=for_step(1))
    end(made)
    assert finish(made, "a", e=DONE, f=DONE, a=DONE) == [
        Finish("e"),
        Finish("f"),
        Forget("e"),
        Forget("f"),
        Finish("a"),
        Close("a"),
    ]
    assert made.idle


def test_edits_of_a_block_that_stopped_are_cancelled_at_the_end() -> None:
    made = with_edits("e")
    begin(made, EA, e=for_step(1), a=STOPPED)
    end(made)
    assert finish(made, "a") == [Cancel("e"), Forget("e"), Close("a")]


def test_an_edit_of_a_block_that_failed_is_cancelled_at_once() -> None:
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=at("norm"))
    assert play(made, reached("norm"), a=FAILED) == [Serve("a"), Cancel("e"), Report("a", Ended.FAILED)]
    assert play(made, reached("mlp", 20)) == []


def test_an_edit_of_a_block_that_stopped_is_still_served_in_the_step() -> None:
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=STOPPED)
    assert play(made, reached("mlp"), e=DONE)[0] == Serve("e")


def test_an_edit_of_an_evicted_request_is_cancelled() -> None:
    made = with_edits("e")
    begin(made, EA, e=for_step(1), a=for_step(1))
    end(made)
    assert play(made, Preempted("a")) == [Fail("a", EVICTED), Cancel("e"), Report("a", Ended.FAILED)]


def test_an_edit_alone_that_waits_makes_an_eviction_a_failure() -> None:
    made = with_edits("e")
    begin(made, EA, e=for_step(1), a=DONE)
    end(made)
    assert play(made, Preempted("a"))[0] == Fail("a", EVICTED)


def test_a_dropped_trace_cancels_edits_first() -> None:
    made = with_edits("e")
    begin(made, EA, e=for_step(1), a=for_step(1))
    end(made)
    assert made.handle(Dropped("t")) == [Cancel("e"), Forget("e"), Cancel("a"), Forget("a")]
    assert made.idle


def test_an_edit_is_no_block_of_the_trace_that_could_be_finished() -> None:
    made = with_edits("e")
    begin(made, EA, e=DONE, a=DONE)
    end(made)
    assert made.handle(Generated("a")) == [Forget("e"), Close("a")]


def test_a_location_is_hooked_for_an_edit_too() -> None:
    made = Machine()
    made.handle(Admitted("e", "e", 0, 0, PROMPT, owner="a", rank=-1), Admitted("a", "t", 0, 0, PROMPT))
    assert begin(made, EA, e=at("mlp"), a=at("norm"))[3:] == [Hook("mlp", "output"), Hook("norm", "output")]


def test_values_are_recorded_after_the_edits_have_changed_them() -> None:
    made = with_edits("e")
    begin(made, EA, e=at("mlp"), a=at("norm", records=True))
    assert play(made, reached("mlp"), e=at("x")) == [Serve("e"), Hook("x", "output"), Record("a")]
