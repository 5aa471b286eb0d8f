"""Barriers: complete, too few, deserted, broken while blocks wait, and passed too often."""

from __future__ import annotations

import pytest

from executor.core.ended import Ended
from executor.interleave.machine.barriers import MOST_PASSES
from executor.interleave.machine.events import AtBarrier, Dropped, Failure, Generated, Preempted, Settled, TurnEnded
from executor.interleave.machine.failures import broken, not_reached
from executor.interleave.machine.instructions import (
    Break,
    Cancel,
    Close,
    Fail,
    Finish,
    Forget,
    Hook,
    Instruction,
    Miss,
    Pass,
    Report,
    Serve,
    Settle,
)
from executor.interleave.machine.turns import BETWEEN
from tests.unit.executor.interleave.machine.situations import (
    DONE,
    FAILED,
    RESULT,
    STOPPED,
    TRIO,
    at,
    barrier,
    begin,
    calls,
    end,
    finish,
    for_step,
    gang,
    location,
    play,
    reached,
)

DESERTED = (
    "1 waited at barrier 1 (of 2) and 0 more could come: the other invokes have ended without it. "
    "Call it in every block that it counts, or make it with a smaller number"
)


def passes(done: list[Instruction]) -> list[Instruction]:
    return [do for do in done if isinstance(do, Pass)]


def test_a_barrier_opens_when_the_last_block_has_come() -> None:
    made = gang("a", "b")
    done = begin(made, "ab", a=[barrier(), at("mlp")], b=[barrier(), at("mlp")])
    assert done[3:] == [Pass("a", -1), Pass("b", -1), Hook("mlp", "output")]


def test_blocks_go_on_in_the_order_in_which_they_came() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=at("late"), b=at("early"))
    assert play(made, reached("early"), b=barrier()) == [Serve("b"), Settle("b", leaving=True)]
    done = play(made, reached("late", 20), a=[barrier(), RESULT], b=RESULT)
    assert passes(done) == [Pass("b", 20), Pass("a", 20)]


def test_what_blocks_were_served_is_settled_after_all_have_gone_on() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=at("mlp"), b=at("mlp"))
    done = play(made, reached("mlp"), a=[barrier(), at("x")], b=[barrier(), at("y")])
    assert done == [
        Serve("a"),
        Serve("b"),
        Pass("a", 10),
        Pass("b", 10),
        Settle("a"),
        Settle("b"),
        Hook("x", "output"),
        Hook("y", "output"),
    ]


def test_a_block_may_ask_for_the_location_where_the_barrier_opened() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=barrier(), b=at("mlp"))
    done = play(made, reached("mlp"), a=[at("mlp"), DONE], b=[barrier(), at("x")])
    assert [do for do in done if not isinstance(do, Settle)][:5] == [
        Serve("b"),
        Pass("a", 10),
        Pass("b", 10),
        Hook("mlp", "output"),
        Hook("x", "output"),
    ]
    assert Serve("a") in done[5:]


def test_too_few_blocks_wait_on() -> None:
    made = gang("a", "b")
    assert passes(begin(made, "ab", a=barrier(), b=at("mlp"))) == []
    assert end(made, b=for_step(1)) == [Miss("b", not_reached(location("mlp")))]


def test_a_barrier_of_three_opens_for_three() -> None:
    made = gang("a", "b", "c")
    begin(made, "abc", a=barrier(TRIO), b=at("mlp"), c=at("mlp"))
    done = play(made, reached("mlp"), a=DONE, b=[barrier(TRIO), DONE], c=[barrier(TRIO), DONE])
    assert passes(done) == [Pass("a", 10), Pass("b", 10), Pass("c", 10)]


def test_two_of_three_open_a_barrier_of_two_and_the_third_is_left() -> None:
    made = gang("a", "b", "c")
    done = begin(made, "abc", a=[barrier(), DONE], b=[barrier(), DONE], c=[barrier(), FAILED])
    assert passes(done)[:2] == [Pass("a", -1), Pass("b", -1)]
    assert passes(done)[2] == Pass("c", -1, broken(DESERTED))


def test_a_barrier_opens_again_and_again() -> None:
    made = gang("a", "b")
    done = begin(made, "ab", a=[barrier(), barrier(), DONE], b=[barrier(), barrier(), DONE])
    assert passes(done) == [Pass("a", -1), Pass("b", -1), Pass("a", -1), Pass("b", -1)]


def test_a_barrier_opens_in_every_step() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=[barrier(), for_step(1)], b=[barrier(), for_step(1)])
    end(made)
    done = begin(made, "ab", tokens=1, a=[barrier(), for_step(2)], b=[barrier(), for_step(2)])
    assert passes(done) == [Pass("a", -1), Pass("b", -1)]


def test_two_barriers_open_in_the_order_of_their_numbers() -> None:
    made = gang("a", "b", "c", "d")
    other = AtBarrier(1, 2)
    begin(made, "abcd", a=at("mlp"), b=barrier(other), c=barrier(), d=at("mlp"))
    done = play(made, reached("mlp"), a=[barrier(other), DONE], b=DONE, c=DONE, d=[barrier(), DONE])
    assert passes(done) == [Pass("c", 10), Pass("d", 10), Pass("b", 10), Pass("a", 10)]


def test_a_call_after_a_barrier_is_answered() -> None:
    made = gang("a", "b")
    done = begin(made, "ab", a=[barrier(), calls(), DONE], b=[barrier(), DONE])
    assert [type(do).__name__ for do in done[3:6]] == ["Pass", "Pass", "Apply"]


# Deserted barriers.


@pytest.mark.parametrize("ends", [DONE, FAILED, STOPPED])
def test_a_block_that_ends_deserts_the_barrier(ends: TurnEnded) -> None:
    made = gang("a", "b")
    begin(made, "ab", a=barrier(), b=at("mlp"))
    done = play(made, reached("mlp"), a=FAILED, b=ends)
    where = done.index(Break("t", 0, DESERTED))
    assert done[0] == Serve("b")
    assert done[where + 1] == Pass("a", 10, broken(DESERTED))
    assert done[-1] == Report("a", Ended.FAILED)


def test_a_block_that_catches_the_error_goes_on() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=barrier(), b=at("mlp"))
    done = play(made, reached("mlp"), a=at("attn"), b=FAILED)
    assert done[-1] == Hook("attn", "output")


def test_blocks_at_two_barriers_wait_until_an_invoke_leaves() -> None:
    """Each waits for the other at a barrier of its own: both could still come as far as the machine knows."""
    made = gang("a", "b")
    done = begin(made, "ab", a=barrier(), b=barrier(AtBarrier(1, 2)))
    assert passes(done) == []
    end(made)
    ended = finish(made, "a", a=FAILED, b=DONE)
    assert passes(ended) == [
        Pass("b", BETWEEN, broken(DESERTED.replace("barrier 1", "barrier 2"))),
    ]


def test_a_gang_member_that_failed_between_steps_deserts_the_barrier_in_the_next() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=barrier(), b=for_step(1))
    end(made)
    assert isinstance(play(made, Preempted("b"))[0], Fail)
    done = begin(made, "a", tokens=1, a=DONE)
    assert passes(done) == [Pass("a", -1, broken(DESERTED))]


def test_an_invoke_that_leaves_deserts_the_barrier() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=barrier(), b=for_step(1))
    end(made)
    done = finish(made, "b", b=DONE, a=FAILED)
    assert done == [
        Finish("b"),
        Break("t", 0, DESERTED),
        Pass("a", BETWEEN, broken(DESERTED)),
        Report("a", Ended.FAILED),
        Close("b"),
    ]


def test_a_group_whose_generations_are_in_different_steps_breaks_the_barrier() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=for_step(1), b=at("mlp", 1))
    end(made)
    begin(made, "a", tokens=1, a=barrier())
    end(made)
    begin(made, "ab", tokens=1)  # "a" is in step 2 now, "b" in step 1
    why = "the invokes came to barrier 1 (of 2) in different steps of their generations"
    done = play(made, reached("mlp"), a=FAILED, b=[barrier(), FAILED])
    assert passes(done) == [Pass("a", 10, broken(why)), Pass("b", 10, broken(why))]


def test_a_group_with_a_request_that_is_not_in_the_step_breaks_the_barrier() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=barrier(), b=for_step(1))
    end(made)
    why = "the generation of invoke 0 had ended when the others came to barrier 1 (of 2)"
    done = begin(made, "b", tokens=1, a=FAILED, b=[barrier(), FAILED])
    assert done[2:4] == [Break("t", 0, why), Pass("a", -1, broken(why))]


def test_a_barrier_that_is_passed_for_ever_breaks() -> None:
    made = gang("a", "b")
    turns = [barrier()] * (MOST_PASSES + 1) + [FAILED]
    done = begin(made, "ab", a=turns, b=turns)
    assert passes(done)[-1] == Pass("b", -1, broken(f"barrier 1 (of 2) was passed {MOST_PASSES} times in one step"))


def test_a_stop_at_a_barrier_by_the_generation() -> None:
    """The engine ended the request (max_tokens) while its block waited: the block learns of it in its last turn."""
    made = gang("a", "b")
    begin(made, "ab", a=barrier(), b=at("mlp", 1))
    end(made)
    assert finish(made, "a", a=FAILED)[:1] == [Finish("a")]
    assert finish(made, "b", b=FAILED) == [Finish("b"), Report("b", Ended.FAILED), Close("b")]


def test_a_stop_after_a_barrier_ends_only_its_own_request() -> None:
    made = gang("a", "b")
    done = begin(made, "ab", a=[barrier(), STOPPED], b=[barrier(), at("mlp")])
    assert done[-2:] == [Report("a", Ended.STOPPED), Hook("mlp", "output")]


def test_a_cancel_at_a_barrier_leaves_nothing_behind() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=barrier(), b=at("mlp"))
    end(made, b=for_step(1))
    assert made.handle(Dropped("t")) == [Cancel("a"), Forget("a"), Cancel("b"), Forget("b")]
    assert made.idle
    assert not made._turns.barriers


def test_a_barrier_of_an_earlier_trace_of_the_same_name_is_forgotten() -> None:
    made = gang("a", "b")
    begin(made, "ab", a=barrier(), b=for_step(1))
    end(made)
    made.handle(Dropped("t"))
    with pytest.raises(KeyError):
        made.handle(Generated("a"))


def test_a_misfit_at_a_barrier_takes_the_block_out_of_it() -> None:
    why = Failure(4, "does not fit")
    made = gang("a", "b")
    begin(made, "ab", a=at("mlp"), b=at("norm"))
    done = play(made, reached("mlp"), {Settle: Settled(why)}, a=[barrier(), FAILED])
    assert done[-1] == Report("a", Ended.FAILED)
    done = play(made, reached("norm", 20), b=[barrier(), FAILED])
    assert passes(done) == [Pass("b", 20, broken(DESERTED))]
