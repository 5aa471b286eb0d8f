"""Gangs and joint blocks: blocks that start together, and blocks that see the rows of all."""

from __future__ import annotations

from executor.core.ended import Ended
from executor.interleave.machine.events import Admitted, Arrived, Dropped, Refused, StepBegan
from executor.interleave.machine.failures import OUT_OF_STEP, no_room
from executor.interleave.machine.instructions import (
    BeginStep,
    Cancel,
    Close,
    Fail,
    FindChanged,
    Finish,
    Forget,
    Hook,
    Report,
    Resume,
    See,
    Serve,
    Start,
)
from executor.interleave.machine.machine import Machine
from tests.unit.executor.interleave.machine.situations import (
    DONE,
    FAILED,
    PROMPT,
    at,
    begin,
    end,
    finish,
    for_step,
    gang,
    play,
    reached,
    with_joint,
)


def test_a_gang_starts_in_one_step() -> None:
    made = gang("a", "b")
    assert begin(made, "ab", a=at("mlp"), b=at("mlp"))[:3] == [BeginStep(("a", "b")), Start("a", 3), Start("b", 3)]


def test_a_gang_that_the_step_has_no_room_for_fails() -> None:
    made = gang("a", "b")
    assert begin(made, "a") == [BeginStep(("a",)), Fail("a", no_room(2)), Report("a", Ended.FAILED)]
    assert begin(made, "b") == [BeginStep(("b",)), Fail("b", no_room(2)), Report("b", Ended.FAILED)]


def test_a_gang_starts_without_a_request_that_was_refused() -> None:
    made = Machine()
    made.handle(Admitted("a", "t", 0, 0, PROMPT, gang=2))
    assert made.handle(Refused("b", "t")) == [Report("b", Ended.FAILED)]
    assert made.handle(Arrived(("a", "b"))) == []
    assert begin(made, "a", a=at("mlp"))[1] == Start("a", 3)
    assert finish(made, "b") == [Close("b")]


def test_a_refused_joint_block_is_no_request_of_the_gang() -> None:
    made = Machine()
    made.handle(Admitted("a", "t", 0, 0, PROMPT, gang=2), Refused("o", "t", joint=True))
    assert begin(made, "a")[1] == Fail("a", no_room(2))


def test_a_refused_request_of_another_trace_does_not_count() -> None:
    made = gang("a", "b")
    made.handle(Refused("c", "u"))
    assert begin(made, "a")[1] == Fail("a", no_room(2))


def test_a_gang_in_its_second_step_need_not_be_together() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=for_step(1), b=for_step(1))
    end(made)
    assert begin(made, "b", tokens=1, b=DONE)[:2] == [BeginStep(("b",)), Resume("b")]


def test_an_error_in_the_middle_of_a_gang_leaves_the_others() -> None:
    made = gang("a", "b", "c")
    done = begin(made, "abc", a=at("mlp"), b=FAILED, c=at("mlp"))
    assert done[3:] == [Start("c", 3), Hook("mlp", "output"), Report("b", Ended.FAILED)]
    assert play(made, reached("mlp"), a=at("x"), c=at("x"))[:2] == [Serve("a"), Serve("c")]


# Outer blocks.


def test_a_joint_block_sees_the_rows_of_its_gang() -> None:
    made = with_joint()
    assert begin(made, "ab", a=at("mlp"), b=at("mlp"), o=at("mlp")) == [
        BeginStep(("a", "b", "o")),
        See("o", ("a", "b")),
        Start("a", 3),
        Start("b", 3),
        Start("o", 6),
        Hook("mlp", "output"),
    ]


def test_a_joint_block_and_the_others_see_what_each_has_written() -> None:
    """Each has its turn, and the change of the one is in the model before the next is served."""
    made = with_joint()
    begin(made, "ab", a=at("mlp"), b=at("mlp"), o=at("mlp"))
    done = play(made, reached("mlp"), a=at("x"), b=at("x"), o=at("x"))
    assert done == [Serve("a"), Hook("x", "output"), Serve("b"), Serve("o")]


def test_a_request_stays_as_long_as_a_joint_block_sees_it() -> None:
    made = with_joint()
    done = begin(made, "ab", a=DONE, b=DONE, o=at("mlp"))
    assert not any(isinstance(do, Report) for do in done)
    assert made.blocks.waits("a") == ["a"]
    done = play(made, reached("mlp"), o=DONE)
    assert done == [
        Serve("o"),
        FindChanged(("a", "o")),
        Report("a", Ended.READ_ONLY),
        FindChanged(("b", "o")),
        Report("b", Ended.READ_ONLY),
    ]
    assert made.blocks.waits("a") == []


def test_a_joint_block_loses_requests_that_have_ended() -> None:
    made = with_joint()
    begin(made, "ab", a=for_step(1), b=for_step(1), o=for_step(1))
    end(made)
    finish(made, "a", a=DONE)
    assert See("o", ("b",)) in begin(made, "b", tokens=1, b=DONE, o=at("mlp", 1))


def test_a_joint_block_whose_gang_is_out_of_step_fails() -> None:
    made = with_joint()
    begin(made, "ab", a=for_step(1), b=for_step(1), o=for_step(1))
    end(made)
    begin(made, "a", tokens=1, a=for_step(2), o=for_step(2))
    end(made)
    done = begin(made, "ab", tokens=1, a=DONE, b=DONE)
    assert Fail("o", OUT_OF_STEP) in done


def test_a_request_that_joins_a_joint_block_late_fails_it() -> None:
    made = with_joint()
    begin(made, "ab", a=for_step(1), b=for_step(1), o=for_step(1))
    end(made)
    begin(made, "a", tokens=1, a=for_step(2), o=for_step(2))
    end(made)
    done = play(made, StepBegan({"b": 1}), b=DONE)
    assert Fail("o", OUT_OF_STEP) in done


def test_a_failed_joint_block_is_no_request_that_ends() -> None:
    made = with_joint()
    begin(made, "ab", a=at("mlp"), b=at("mlp"), o=at("mlp"))
    done = play(made, reached("mlp"), a=at("x"), b=at("x"), o=FAILED)
    assert not any(isinstance(do, Report) for do in done)


def test_a_joint_block_ends_after_its_gang() -> None:
    made = with_joint()
    begin(made, "ab", a=for_step(1), b=for_step(1), o=for_step(1))
    end(made)
    finish(made, "a", a=DONE)
    finish(made, "b", b=DONE)
    assert finish(made, "o", o=DONE) == [Finish("o"), Close("o")]
    assert made.idle


def test_a_dropped_trace_takes_its_joint_block_along() -> None:
    made = with_joint()
    begin(made, "ab", a=for_step(1), b=DONE, o=for_step(1))
    end(made)
    assert made.handle(Dropped("t")) == [
        Cancel("a"),
        Forget("a"),
        Forget("b"),
        Cancel("o"),
        Forget("o"),
    ]
    assert made.idle
