"""Turns: which blocks run in a step, in which order, and what they wait for next."""

from __future__ import annotations

import pytest

from executor.core.ended import Ended
from executor.core.location import Location
from executor.interleave.machine.events import (
    Admitted,
    Changed,
    Failure,
    Recorded,
    Settled,
    StartedEarly,
    StepBegan,
    Streamed,
    TurnEnded,
)
from executor.interleave.machine.failures import not_reached, too_long
from executor.interleave.machine.instructions import (
    Apply,
    BeginStep,
    Fail,
    FindChanged,
    Hook,
    Miss,
    Overrun,
    Record,
    Report,
    Resume,
    ResumeAll,
    Serve,
    ServeAll,
    Settle,
    Start,
    Stream,
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
    barrier,
    begin,
    calls,
    end,
    for_step,
    gang,
    location,
    machine,
    play,
    reached,
)

MISFIT = Failure(4, "what was assigned does not fit", "mlp.output")


def test_a_block_starts_and_its_location_is_hooked() -> None:
    made = machine("a")
    assert begin(made, "a", a=at("mlp")) == [BeginStep(("a",)), Start("a", 3), Hook("mlp", "output")]


def test_a_location_is_hooked_once_for_all_blocks_that_wait_for_it() -> None:
    made = machine("a", "b")
    assert begin(made, "ab", a=at("mlp"), b=at("mlp")) == [
        BeginStep(("a", "b")),
        Start("a", 3),
        Start("b", 3),
        Hook("mlp", "output"),
    ]


def test_a_block_goes_from_location_to_location() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp"))
    assert play(made, reached("mlp"), a=at("attn")) == [Serve("a"), Hook("attn", "output")]
    assert play(made, reached("attn", 20), a=RESULT) == [Serve("a"), FindChanged(("a",)), Report("a", Ended.READ_ONLY)]


def test_a_location_is_served_in_the_order_of_arrival_invoke_and_rank() -> None:
    made = Machine()
    for key, arrival, invoke in (("late", 1, 0), ("second", 0, 1), ("first", 0, 0)):
        made.handle(Admitted(key, f"t{arrival}", invoke, arrival, 3))
    begin(made, ["late", "second", "first"], late=at("mlp"), second=at("mlp"), first=at("mlp"))
    done = play(made, reached("mlp"), late=at("x"), second=at("x"), first=at("x"))
    assert done == [Serve("first"), Serve("second"), Serve("late"), Hook("x", "output")]


def test_blocks_that_are_apart_are_served_by_one_instruction() -> None:
    made = machine("a", "b", "c", apart=True)
    begin(made, "abc", a=at("mlp"), b=at("mlp"), c=at("mlp"))
    done = play(made, reached("mlp"), a=at("x"), b=for_step(1), c=for_step(1))
    assert done == [ServeAll(("a", "b", "c")), Hook("x", "output")]
    play(made, reached("x"), a=for_step(1))
    end(made)
    assert begin(made, "abc", tokens=1, a=at("mlp", 1), b=at("mlp", 1), c=DONE)[:2] == [
        BeginStep(("a", "b", "c")),
        ResumeAll(("a", "b", "c")),
    ]


def test_a_block_that_is_not_apart_has_its_turn_by_itself_and_in_its_order() -> None:
    made = Machine()
    for arrival, (key, apart) in enumerate((("a", True), ("b", True), ("c", False), ("d", True), ("e", True))):
        made.handle(Admitted(key, f"t{arrival}", 0, arrival, 3, apart=apart))
    begin(made, "abcde", **dict.fromkeys("abcde", at("mlp")))
    done = play(made, reached("mlp"), **dict.fromkeys("abcde", at("x")))
    assert done == [ServeAll(("a", "b")), Serve("c"), ServeAll(("d", "e")), Hook("x", "output")]


def test_a_misfit_among_blocks_that_are_apart_is_thrown_after_their_turns() -> None:
    made = machine("a", "b", apart=True)
    begin(made, "ab", a=at("mlp"), b=at("mlp"))
    done = play(made, reached("mlp"), a=[at("x", misfit=MISFIT), FAILED], b=at("x"))
    assert done == [ServeAll(("a", "b")), Throw("a", MISFIT), Report("a", Ended.FAILED), Hook("x", "output")]


def test_blocks_that_are_apart_may_apply_modules_after_their_turns() -> None:
    made = machine("a", "b", apart=True)
    begin(made, "ab", a=at("mlp"), b=at("mlp"))
    done = play(made, reached("mlp"), a=[calls(), at("x")], b=[calls(), at("x")])
    assert done == [ServeAll(("a", "b")), Apply("a"), Apply("b"), Hook("x", "output")]


def test_a_location_that_no_block_waits_for_asks_for_nothing() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp"))
    assert play(made, reached("attn")) == []


def test_a_step_without_the_request_leaves_its_block_alone() -> None:
    made = machine("a", "b")
    assert begin(made, "b", b=at("mlp")) == [BeginStep(("b",)), Start("b", 3), Hook("mlp", "output")]


def test_a_block_of_a_later_step_waits_for_the_step() -> None:
    made = machine("a")
    assert begin(made, "a", a=at("mlp", 1)) == [BeginStep(("a",)), Start("a", 3)]
    assert end(made) == []
    assert begin(made, "a", tokens=1) == [BeginStep(("a",)), Hook("mlp", "output")]


def test_a_block_that_asks_for_a_step_is_resumed_when_it_begins() -> None:
    made = machine("a")
    begin(made, "a", a=for_step(1))
    end(made)
    assert begin(made, "a", tokens=1, a=at("mlp", 1)) == [BeginStep(("a",)), Resume("a"), Hook("mlp", "output")]


def test_a_block_that_asks_for_a_far_step_sleeps_until_then() -> None:
    made = machine("a")
    begin(made, "a", a=for_step(2))
    end(made)
    assert begin(made, "a", tokens=1) == [BeginStep(("a",))]
    end(made)
    assert begin(made, "a", tokens=1, a=DONE)[1] == Resume("a")


def test_a_block_that_waits_for_the_result_is_no_longer_in_steps() -> None:
    made = machine("a")
    assert begin(made, "a", a=RESULT)[-1] == Report("a", Ended.READ_ONLY)
    assert made.blocks.waits("a") == []


def test_a_block_that_changed_something_keeps_its_request() -> None:
    made = machine("a")
    done = play(made, StepBegan({"a": 3}), {FindChanged: Changed(frozenset("a"))}, a=DONE)
    assert done == [BeginStep(("a",)), Start("a", 3), FindChanged(("a",))]


def test_a_prompt_that_is_cut_into_steps_fails() -> None:
    made = machine("a")
    assert begin(made, "a", tokens=2) == [BeginStep(("a",)), Fail("a", too_long(3)), Report("a", Ended.FAILED)]
    assert made.blocks.waits("a") == []


@pytest.mark.parametrize("kind", [FAILED, STOPPED])
def test_a_block_that_ends_early_ends_its_request(kind: TurnEnded) -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp"))
    assert play(made, reached("mlp"), a=kind) == [Serve("a"), Report("a", kind.ended)]  # type: ignore[arg-type]
    assert end(made) == []


def test_an_error_of_one_block_does_not_keep_the_next_from_its_turn() -> None:
    made = machine("a", "b")
    begin(made, "ab", a=at("mlp"), b=at("mlp"))
    done = play(made, reached("mlp"), a=FAILED, b=at("attn"))
    assert done == [Serve("a"), Serve("b"), Report("a", Ended.FAILED), Hook("attn", "output")]


# Calls.


def test_a_call_is_answered_where_it_was_made() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp"))
    assert play(made, reached("mlp"), a=[calls(), at("attn")]) == [Serve("a"), Apply("a"), Hook("attn", "output")]


def test_calls_follow_calls_until_the_block_asks_for_something_else() -> None:
    made = machine("a")
    done = begin(made, "a", a=[calls(), calls(), calls(), at("mlp")])
    assert done == [BeginStep(("a",)), Start("a", 3), Apply("a"), Apply("a"), Apply("a"), Hook("mlp", "output")]


def test_calls_of_several_blocks_are_answered_after_all_had_their_turns() -> None:
    made = machine("a", "b")
    begin(made, "ab", a=at("mlp"), b=at("mlp"))
    done = play(made, reached("mlp"), a=[calls(), at("x")], b=[calls(), at("y")])
    assert done == [Serve("a"), Serve("b"), Apply("a"), Apply("b"), Hook("x", "output"), Hook("y", "output")]


def test_a_call_that_raises_ends_the_block() -> None:
    made = machine("a")
    assert begin(made, "a", a=[calls(), FAILED])[-2:] == [Apply("a"), Report("a", Ended.FAILED)]


def test_a_call_of_a_block_whose_time_is_over_is_not_answered() -> None:
    made = machine("a")
    done = begin(made, "a", a=[calls(overdue=True), FAILED])
    assert done[-2:] == [Overrun("a"), Report("a", Ended.FAILED)]


# The end of a step.


def test_a_location_that_was_not_reached_is_an_error_in_the_block() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp"))
    assert end(made, a=FAILED) == [Miss("a", not_reached(location("mlp"))), Report("a", Ended.FAILED)]


def test_a_block_that_catches_it_may_go_on_in_the_next_step() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp"))
    assert end(made, a=for_step(1)) == [Miss("a", not_reached(location("mlp")))]
    assert begin(made, "a", tokens=1, a=DONE)[:2] == [BeginStep(("a",)), Resume("a")]


def test_the_message_names_what_the_block_wrote() -> None:
    error = not_reached(Location("model.layers.1.mlp", "output", 2, "model.blocks[1].mlp_out"))
    assert error.message == (
        "model.blocks[1].mlp_out (step 2) was not reached in step 2: the forward pass did not call model.layers.1.mlp"
    )
    assert error.location == "model.blocks[1].mlp_out (step 2)"


# A change that does not fit.


def test_a_change_that_does_not_fit_is_raised_where_the_block_waits() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp"))
    done = play(made, reached("mlp"), a=[at("attn", misfit=MISFIT), FAILED])
    assert done == [Serve("a"), Throw("a", MISFIT), Report("a", Ended.FAILED)]


def test_a_block_that_catches_it_goes_on() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp"))
    done = play(made, reached("mlp"), a=[at("attn", misfit=MISFIT), at("norm")])
    assert done == [Serve("a"), Throw("a", MISFIT), Hook("norm", "output")]


def test_a_block_that_has_ended_fails_for_it() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp"))
    done = play(made, reached("mlp"), a=[TurnEnded(ended=Ended.DONE, misfit=MISFIT)])
    assert done == [Serve("a"), Fail("a", MISFIT), Report("a", Ended.FAILED)]


def test_a_change_of_a_block_at_a_barrier_is_settled_when_the_model_goes_on() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=at("mlp"), b=at("attn"))
    assert play(made, reached("mlp"), a=barrier()) == [Serve("a"), Settle("a", leaving=True)]


def test_a_change_at_a_barrier_that_does_not_fit_is_raised_there() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=at("mlp"), b=at("norm"))
    done = play(made, reached("mlp"), {Settle: Settled(MISFIT)}, a=[barrier(), at("attn")])
    assert done == [Serve("a"), Settle("a", leaving=True), Throw("a", MISFIT), Hook("attn", "output")]


# Recording and streaming.


def test_values_are_recorded_after_all_turns_at_a_location() -> None:
    made = machine("a", "b")
    begin(made, "ab", a=at("mlp", records=True), b=at("mlp"))
    done = play(made, reached("mlp"), a=at("x", records=True), b=at("x"))
    assert done == [Serve("a"), Serve("b"), Hook("x", "output"), Record("a")]


def test_values_are_recorded_for_a_block_that_has_ended() -> None:
    made = machine("a")
    begin(made, "a", a=TurnEnded(ended=Ended.DONE, records=True))
    assert made.blocks.waits("a") == ["a"]
    assert play(made, reached("mlp")) == [Record("a")]


def test_nothing_is_recorded_for_a_block_that_failed() -> None:
    made = machine("a")
    begin(made, "a", a=at("mlp", records=True))
    assert play(made, reached("mlp"), a=TurnEnded(ended=Ended.FAILED, records=True)) == [
        Serve("a"),
        Report("a", Ended.FAILED),
    ]


def test_a_value_that_cannot_be_recorded_fails_the_block() -> None:
    failure = object()
    made = machine("a")
    begin(made, "a", a=at("mlp", records=True))
    done = play(made, reached("norm"), {Record: Recorded(failure)})  # type: ignore[arg-type]
    assert done == [Record("a"), Fail("a", failure), Report("a", Ended.FAILED)]  # type: ignore[arg-type]


def test_a_streamed_block_sends_what_is_new_at_the_end_of_every_step() -> None:
    made = machine("a", streamed=True)
    begin(made, "a", a=for_step(1))
    assert end(made) == [Stream("a", last=False)]
    begin(made, "a", tokens=1, a=DONE)
    assert end(made) == [Stream("a", last=True)]


def test_a_streamed_block_that_is_failed_sends_what_it_has_at_once() -> None:
    made = machine("a", streamed=True)
    assert begin(made, "a", tokens=1)[1:] == [Fail("a", too_long(3)), Report("a", Ended.FAILED), Stream("a", last=True)]


def test_saves_that_cannot_be_sent_end_the_request() -> None:
    made = machine("a", streamed=True)
    begin(made, "a", a=for_step(1))
    assert end(made, {Stream: Streamed(sent=False)}) == [Stream("a", last=False), Report("a", Ended.FAILED)]


def test_a_block_that_starts_early_is_resumed_in_its_first_step() -> None:
    made = machine("a", "b", "c")
    early = play(made, StartedEarly(tuple("abc")), a=for_step(0), b=for_step(0, away=True), c=at("one"))
    assert early == [Start("a", PROMPT), Start("b", PROMPT), Start("c", PROMPT)]
    assert [made.blocks.waits(key) for key in "abc"] == [["a"], [], ["c"]]
    first = begin(made, "ac", a=at("one"))
    assert first == [BeginStep(("a", "c")), Resume("a"), Hook("one", "output")]


def test_a_block_that_fails_early_ends_its_request_in_its_first_step() -> None:
    made = machine("a")
    assert play(made, StartedEarly(("a", "gone")), a=FAILED) == [Start("a", PROMPT)]
    assert begin(made, "a") == [BeginStep(("a",)), Report("a", Ended.FAILED)]


def test_an_early_block_that_calls_a_module_is_answered_in_its_first_step() -> None:
    made = machine("a")
    play(made, StartedEarly(("a",)), a=calls())
    assert begin(made, "a", a=at("one")) == [BeginStep(("a",)), Apply("a"), Hook("one", "output")]
