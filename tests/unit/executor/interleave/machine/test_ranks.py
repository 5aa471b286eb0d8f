"""Several ranks: a block that differs on one of them fails on all, and all issue the same collective instructions."""

from __future__ import annotations

import pytest

from executor.core.ended import Ended
from executor.core.location import Kind, Location
from executor.interleave.machine.events import (
    Arrived,
    AtBarrier,
    CacheSpoilt,
    Compared,
    Failure,
    Generated,
    ModelRan,
    Refused,
    Returned,
    StepBegan,
    TurnEnded,
)
from executor.interleave.machine.failures import NOT_BOUND, different_values, divergence, not_finite
from executor.interleave.machine.instructions import (
    Apply,
    AwaitCache,
    Cancel,
    CheckCache,
    Close,
    Compare,
    CompareAdmitted,
    CompareWritten,
    Fail,
    FailForEdit,
    Finish,
    Hook,
    Overrun,
    Report,
    Serve,
    Start,
    Throw,
    Withdraw,
)
from tests.unit.executor.interleave.machine.situations import (
    DONE,
    FAILED,
    at,
    barrier,
    begin,
    calls,
    end,
    finish,
    for_step,
    gang,
    location,
    machine,
    play,
    reached,
    with_edits,
    with_joint,
)

MISFIT = Failure(4, "does not fit")


def ways(*ranks: list[int]) -> Compared:
    """The votes of a `Compare`: of each rank the ways of the blocks, none of which is overdue."""
    return Compared([[*rank, *[0] * len(rank)] for rank in ranks])


def test_one_rank_compares_nothing() -> None:
    made = machine("a")
    done = begin(made, "a", a=at("mlp")) + play(made, reached("mlp"), a=for_step(1)) + end(made)
    assert not any(isinstance(do, Compare | CompareWritten) for do in done)


def test_turns_are_compared_once_for_all_blocks_of_a_round() -> None:
    made = machine("a", "b", alone=False)
    assert begin(made, "ab", a=at("mlp"), b=at("mlp"))[1:] == [
        Start("a", 3),
        Start("b", 3),
        Compare(("a", "b")),
        Hook("mlp", "output"),
    ]
    assert play(made, reached("mlp"), a=at("x"), b=at("x"))[:3] == [Serve("a"), Serve("b"), Compare(("a", "b"))]


def test_a_rank_that_differs_at_the_start_fails_the_block() -> None:
    made = machine("a", "b", alone=False)
    done = play(made, StepBegan({"a": 3, "b": 3}), {Compare: ways([1, 5], [2, 5])}, a=at("mlp"), b=at("mlp"))
    assert done[3:] == [
        Compare(("a", "b")),
        Fail("a", divergence(location("mlp"), 2)),
        Report("a", Ended.FAILED),
        Hook("mlp", "output"),
    ]


def test_a_rank_that_differs_at_a_location_fails_the_block() -> None:
    made = machine("a", alone=False)
    begin(made, "a", a=at("mlp"))
    done = play(made, reached("mlp"), {Compare: ways([1], [1], [3])}, a=at("x"))
    assert done == [Serve("a"), Compare(("a",)), Fail("a", divergence(location("x"), 3)), Report("a", Ended.FAILED)]


def test_a_block_that_failed_here_and_not_there_keeps_its_own_error() -> None:
    made = machine("a", alone=False)
    begin(made, "a", a=at("mlp"))
    done = play(made, reached("mlp"), {Compare: ways([1], [2])}, a=FAILED)
    assert done == [Serve("a"), Compare(("a",)), Report("a", Ended.FAILED)]


def test_a_block_that_ended_here_and_failed_there_fails() -> None:
    made = machine("a", alone=False)
    begin(made, "a", a=at("mlp"))
    done = play(made, reached("mlp"), {Compare: ways([1], [2])}, a=DONE)
    assert done[2:] == [Fail("a", divergence(None, 2)), Report("a", Ended.FAILED)]


def test_a_rank_that_differs_at_the_end_fails_the_block() -> None:
    made = machine("a", alone=False)
    begin(made, "a", a=for_step(1))
    done = play(made, Generated("a"), {Compare: ways([1], [2])}, a=DONE)
    assert done == [
        AwaitCache(("a",)),
        CompareWritten(("a",), (0,)),
        Finish("a"),
        Compare(("a",)),
        Fail("a", divergence(None, 2)),
        Report("a", Ended.FAILED),
        Close("a"),
    ]


def test_a_rank_that_could_not_bind_a_block_fails_it_on_all() -> None:
    made = machine("a", alone=False)
    done = play(made, Arrived(("a",)), {CompareAdmitted: Compared([[1], [0]])})
    assert done == [CompareAdmitted((1,)), Fail("a", NOT_BOUND), Report("a", Ended.FAILED)]


def test_a_rank_that_could_not_bind_says_so() -> None:
    made = machine(alone=False)
    made.handle(Refused("a", "t"))
    assert play(made, Arrived(("a",)), {CompareAdmitted: Compared([[1], [0]])}) == [CompareAdmitted((0,))]


AWAY = for_step(1, away=True)


def test_a_loop_that_is_in_the_tables_of_all_ranks_stays_there() -> None:
    made = machine("a", "b", alone=False)
    votes = Compared([[1, 2, 0, 0, 7, 0], [1, 2, 0, 0, 7, 0]])
    play(made, StepBegan({"a": 3, "b": 3}), {Compare: votes}, a=AWAY, b=for_step(1))
    assert not made.blocks.waits("a") and made.blocks.waits("b")


@pytest.mark.parametrize("other", [0, 8], ids=["is not there", "is another loop"])
def test_a_loop_that_another_rank_does_not_have_leaves_the_tables(other: int) -> None:
    made = machine("a", "b", alone=False)
    votes = Compared([[1, 2, 0, 0, 7, 5], [1, 2, 0, 0, other, 5]])
    done = play(made, StepBegan({"a": 3, "b": 3}), {Compare: votes}, a=AWAY, b=AWAY)
    assert done[3:] == [Compare(("a", "b")), Withdraw("a")]
    assert made.blocks.waits("a") and not made.blocks.waits("b")


def test_a_loop_of_which_this_rank_has_nothing_is_the_block_s() -> None:
    made = machine("a", alone=False)
    done = play(made, StepBegan({"a": 3}), {Compare: Compared([[1, 0, 0], [1, 0, 7]])}, a=for_step(1))
    assert done[2:] == [Compare(("a",))] and made.blocks.waits("a")


def test_a_call_with_other_values_on_a_rank_is_not_answered() -> None:
    made = machine("a", alone=False)
    done = play(made, StepBegan({"a": 3}), {Compare: ways([1], [2])}, a=calls("lm_head(…)"))
    assert done[2:] == [Compare(("a",)), Fail("a", divergence("lm_head(…)", 2)), Report("a", Ended.FAILED)]


def test_a_call_is_compared_before_it_is_answered_and_after() -> None:
    made = machine("a", alone=False)
    done = begin(made, "a", a=[calls(), at("mlp")])
    assert done[2:] == [Compare(("a",)), Apply("a"), Compare(("a",)), Hook("mlp", "output")]


def test_a_call_that_is_overdue_on_any_rank_is_overdue_on_all() -> None:
    made = machine("a", alone=False)
    late = Compared([[7, 0], [7, 1]])
    done = play(made, StepBegan({"a": 3}), {Compare: [late, ways([1], [1])]}, a=[calls(), FAILED])
    assert done[2:] == [Compare(("a",)), Overrun("a"), Compare(("a",)), Report("a", Ended.FAILED)]


def test_a_misfit_is_raised_before_the_ranks_compare() -> None:
    made = machine("a", alone=False)
    begin(made, "a", a=at("mlp"))
    done = play(made, reached("mlp"), a=[at("x", misfit=MISFIT), at("y")])
    assert done == [Serve("a"), Throw("a", MISFIT), Compare(("a",)), Hook("y", "output")]


def test_an_edit_that_fails_on_one_rank_does_not_end_its_request_before_the_ranks_compare() -> None:
    """The other rank serves the request's own block, which is collective."""
    made = with_edits("e", alone=False)
    begin(made, ["e", "a"], e=at("mlp"), a=at("mlp"))
    done = play(made, reached("mlp"), {Compare: ways([1, 1], [2, 1])}, e=FAILED, a=at("x"))
    assert done == [
        Serve("e"),
        Serve("a"),
        Compare(("e", "a")),
        FailForEdit("a", "e"),
        Report("a", Ended.FAILED),
    ]


def test_an_ended_edit_whose_change_does_not_fit_ends_its_request_after_the_ranks_have_compared() -> None:
    made = with_edits("e", alone=False)
    begin(made, ["e", "a"], e=at("mlp"), a=at("mlp"))
    done = play(made, reached("mlp"), e=TurnEnded(ended=Ended.DONE, misfit=MISFIT), a=at("x"))
    assert done == [
        Serve("e"),
        Fail("e", MISFIT),
        Serve("a"),
        Compare(("e", "a")),
        FailForEdit("a", "e"),
        Report("a", Ended.FAILED),
    ]


def test_a_block_that_failed_by_itself_takes_its_edits_along_on_every_rank() -> None:
    """On another rank the block may have been failed for it: the edits are served on neither."""
    made = with_edits("e", alone=False)
    begin(made, ["e", "a"], e=at("norm"), a=at("mlp"))
    done = play(made, reached("mlp"), {Compare: ways([1], [2])}, a=FAILED)
    assert done == [Serve("a"), Compare(("a",)), Cancel("e"), Report("a", Ended.FAILED)]


def test_the_end_of_a_request_that_another_rank_could_not_bind_is_not_compared() -> None:
    made = machine("a", alone=False)
    play(made, Arrived(("a",)), {CompareAdmitted: Compared([[1], [0]])})
    assert finish(made, "a") == [Close("a")]


def test_a_gang_starts_without_a_request_that_another_rank_could_not_bind() -> None:
    made = gang("a", "b", alone=False)
    play(made, Arrived(("a", "b")), {CompareAdmitted: Compared([[1, 1], [1, 0]])})
    assert begin(made, "a", a=at("mlp"))[1] == Start("a", 3)


def test_an_edit_that_differs_on_a_rank_fails_its_request() -> None:
    made = with_edits("e", alone=False)
    begin(made, ["e", "a"], e=at("mlp"), a=at("norm"))
    done = play(made, reached("mlp"), {Compare: ways([1], [2])}, e=at("x"))
    assert done[2:] == [
        Fail("e", divergence(location("x"), 2)),
        FailForEdit("a", "e"),
        Report("a", Ended.FAILED),
    ]


def test_barriers_open_only_after_the_ranks_have_compared() -> None:
    made = gang("a", "b", alone=False)
    done = begin(made, "ab", a=[barrier(), at("x")], b=[barrier(), at("x")])
    kinds = [type(do).__name__ for do in done]
    assert kinds == ["BeginStep", "Start", "Start", "Compare", "Pass", "Pass", "Compare", "Hook"]


def test_a_second_barrier_does_not_open_before_the_turns_of_the_first_are_compared() -> None:
    """What a rank's block does after the first barrier may differ; the ranks must compare the same blocks."""
    other = AtBarrier(1, 2)
    made = gang("a", "b", "c", alone=False)
    done = begin(made, "abc", a=[barrier(), barrier(other), DONE], b=[barrier(), DONE], c=[barrier(other), DONE])
    assert [do.blocks for do in done if isinstance(do, Compare)] == [("a", "b", "c"), ("a", "b"), ("c", "a")]


def test_a_block_whose_change_at_a_barrier_was_settled_is_compared_whether_it_fitted_or_not() -> None:
    made = gang("a", "b", alone=False)
    begin(made, "ab", a=at("mlp"), b=at("norm"))
    done = play(made, reached("mlp"), a=barrier())
    assert [type(do).__name__ for do in done] == ["Serve", "Compare", "Settle", "Compare"]


# The end of a step.


def test_what_blocks_wrote_is_compared_once_a_step() -> None:
    made = machine("a", "b", alone=False)
    begin(made, "ab", a=for_step(1), b=for_step(1))
    assert end(made) == [CompareWritten(("a", "b"), (0, 0))]


def test_a_block_that_wrote_something_else_on_a_rank_fails() -> None:
    made = machine("a", "b", alone=False)
    begin(made, "ab", a=for_step(1), b=for_step(1))
    done = end(made, {CompareWritten: Compared([[0, 0, 5, 6], [0, 0, 5, 7]])})
    assert done[1:] == [Fail("b", different_values(0, 2)), Report("b", Ended.FAILED)]


def test_an_edit_that_wrote_something_else_on_a_rank_fails_its_request() -> None:
    made = with_edits("e", alone=False)
    begin(made, ["e", "a"], e=for_step(1), a=for_step(1))
    done = end(made, {CompareWritten: Compared([[0, 0, 5, 6], [0, 0, 4, 6]])})
    assert done[1:] == [Fail("e", different_values(0, 2)), FailForEdit("a", "e"), Report("a", Ended.FAILED)]


@pytest.mark.parametrize("here", [True, False])
def test_a_cache_that_is_spoilt_on_any_rank_fails_the_block(here: bool) -> None:
    made = machine("a", alone=False)
    begin(made, "a", a=for_step(1))
    spoilt = CacheSpoilt(frozenset("a" if here else ""))
    assert play(made, ModelRan(), {CheckCache: spoilt}) == [CheckCache(("a",))]
    done = end(made, {CompareWritten: Compared([[0, 9], [1, 9]])})
    assert done == [CompareWritten(("a",), (int(here),)), Fail("a", not_finite(0)), Report("a", Ended.FAILED)]


def test_a_cache_that_is_spoilt_on_the_only_rank_fails_the_block() -> None:
    made = machine("a", "b")
    begin(made, "ab", a=for_step(1), b=for_step(1))
    play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset("b"))})
    assert end(made) == [Fail("b", not_finite(0)), Report("b", Ended.FAILED)]


def test_a_spoilt_cache_is_no_matter_of_the_next_step() -> None:
    made = machine("a", "b")
    begin(made, "ab", a=for_step(1), b=for_step(2))
    play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset("a"))})
    end(made)
    begin(made, "b", tokens=1)
    play(made, ModelRan())
    assert end(made) == []


def test_a_cache_that_is_known_to_be_spoilt_later_fails_the_block_when_it_is_in_a_step() -> None:
    made = machine("a", "b")
    begin(made, "ab", a=for_step(1), b=for_step(1))
    assert play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset(), frozenset("a"))}) == [CheckCache(("a", "b"))]
    assert end(made) == []
    begin(made, "b", tokens=1, b=for_step(2))
    play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset("a"))})
    assert end(made) == []
    begin(made, "a", tokens=1, a=for_step(2))
    play(made, ModelRan())
    assert end(made) == [Fail("a", not_finite(1)), Report("a", Ended.FAILED)]


def test_a_block_that_left_long_ago_spoilt_the_cache() -> None:
    made = machine("a", "b")
    begin(made, "ab", a=DONE, b=for_step(1))
    finish(made, "a")
    play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset("a"))})
    assert end(made) == []


@pytest.mark.parametrize("ranks", [[0, 0], [0, 1], [1, 0], [1, 1]])
def test_the_end_of_a_request_waits_for_what_the_device_says_of_the_cache(ranks: list[int]) -> None:
    """Each rank says what it knows, and a request that spoilt the cache on any rank fails on all."""
    made = machine("a", alone=False)
    begin(made, "a", a=for_step(1))
    play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset(), frozenset("a"))})
    end(made)
    here = CacheSpoilt(frozenset("a" if ranks[0] else ""))
    votes = Compared([[spoilt, 0] for spoilt in ranks])
    spoilt = any(ranks)
    turns = {} if spoilt else {"a": DONE}
    done = play(made, Generated("a"), {AwaitCache: here, CompareWritten: votes}, **turns)
    assert done[:2] == [AwaitCache(("a",)), CompareWritten(("a",), (ranks[0],))]
    failed = [Fail("a", not_finite(0)), Report("a", Ended.FAILED)]
    assert done[2:] == [*(failed if spoilt else [Finish("a"), Compare(("a",))]), Close("a")]


def test_a_request_that_was_not_looked_at_ends_at_once() -> None:
    made = machine("a")
    begin(made, "a", a=for_step(1))
    play(made, ModelRan())
    end(made)
    assert finish(made, "a", a=DONE) == [Finish("a"), Close("a")]


def test_an_edit_that_spoilt_the_cache_fails_its_request_at_the_end() -> None:
    made = with_edits("e")
    begin(made, ["e", "a"], e=DONE, a=for_step(1))
    play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset(), frozenset("e"))})
    end(made)
    done = play(made, Generated("a"), {AwaitCache: CacheSpoilt(frozenset("e"))})
    assert done[:3] == [AwaitCache(("e",)), Fail("e", not_finite(0)), FailForEdit("a", "e")]
    assert done[-1] == Close("a") and Finish("a") not in done


def test_a_joint_block_that_spoilt_the_cache_fails_its_gang_at_the_first_end() -> None:
    made = with_joint()
    begin(made, "ab", a=for_step(1), b=for_step(1), o=for_step(1))
    play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset(), frozenset("o"))})
    end(made)
    done = play(made, Generated("a"), {AwaitCache: CacheSpoilt(frozenset("o"))})
    assert [do.block for do in done if isinstance(do, Fail)] == ["o", "a", "b"] and done[-1] == Close("a")


def test_a_loop_that_comes_back_from_the_tables_is_waited_for() -> None:
    made = machine("a")
    begin(made, "a", a=TurnEnded(waits=Location("", Kind.STEP, 1), away=True))
    end(made)
    made.handle(Returned("a", 3, Location("", Kind.STEP, 4), looked_at=True))
    done = play(made, Generated("a"), {AwaitCache: CacheSpoilt(frozenset("a"))})
    assert done == [AwaitCache(("a",)), Fail("a", not_finite(3)), Report("a", Ended.FAILED), Close("a")]


def test_a_block_that_ended_itself_still_fails_for_its_cache() -> None:
    made = machine("a")
    begin(made, "a", a=DONE)
    play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset("a"))})
    assert end(made)[0] == Fail("a", not_finite(0))


def test_a_failed_block_keeps_its_own_error_whatever_its_cache() -> None:
    made = machine("a")
    begin(made, "a", a=FAILED)
    play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset("a"))})
    assert end(made) == []


def test_a_joint_block_that_spoilt_the_cache_fails_its_gang() -> None:
    made = with_joint()
    begin(made, "ab", a=for_step(1), b=for_step(1), o=for_step(1))
    play(made, ModelRan(), {CheckCache: CacheSpoilt(frozenset("o"))})
    assert end(made) == [
        Fail("o", not_finite(0)),
        Fail("a", not_finite(0)),
        Report("a", Ended.FAILED),
        Fail("b", not_finite(0)),
        Report("b", Ended.FAILED),
    ]
    assert finish(made, "a")
