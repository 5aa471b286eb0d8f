"""Which traced requests start in a step, by what the step has left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from executor.core.fairness import NOBODY, Flow
from executor.plugin.waiting_room import MOST_PASSES, Left, Limits, Start, Traced, Used, WaitingRoom

LIMITS = Limits(rows=64, seats=6, blocks=16)
RED = Flow("red", "s")


@dataclass(eq=False)
class Asked:
    """A request as the room sees it."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    ready: bool = True


class Room:
    """A waiting room, and the requests that came, in their order."""

    def __init__(self) -> None:
        self.came: list[Any] = []
        self.flows: dict[str, Flow] = {}
        self.room = WaitingRoom(LIMITS, lambda request: request.ready, lambda one: self.flows[one.request_id])  # type: ignore[attr-defined]

    def traced(
        self,
        name: str,
        rows: int,
        blocks: int = 1,
        flow: Flow = RED,
        gang: int = 0,
        ready: bool = True,
        sandboxed: bool = False,
    ) -> Traced:
        """Let a traced request come; the part of its name before the slash is its trace."""
        request: Any = Asked(name, rows, ready=ready)
        trace = name.partition("/")[0]
        entry = Traced(request, flow, rows, 1, blocks, rows <= LIMITS.rows, sandboxed=trace if sandboxed else "")
        self.came.append(request)
        self.flows[name] = flow
        self.room.enter(entry, trace, gang)
        return entry

    def plain(self, name: str, rows: int) -> None:
        self.came.append(Asked(name, rows))
        self.flows[name] = NOBODY

    def next(
        self, rows: int = 64, seats: int = 6, blocks: int = 16, may_own: bool = True, processes: int = 0,
        served: tuple[str, ...] = (), **used: int,
    ) -> Start:  # fmt: skip
        """Return what starts; `used` has the cache blocks that running requests of a tenant may come to hold."""
        return self.room.next(
            [], self.came, [], Used(Counter(dict.fromkeys(used, 1)), Counter(used)),
            Left(rows, seats, blocks, may_own, processes, served),
        )  # fmt: skip


def names(start: Start) -> list[str]:
    return [request.request_id for request in start.requests]


@pytest.fixture
def room() -> Room:
    return Room()


def test_prompts_that_fit_start_beside_the_running_requests(room: Room) -> None:
    room.traced("one", 30)
    room.traced("two", 30)
    start = room.next(rows=60)
    assert names(start) == ["one", "two"] and not start.own and not start.closed


def test_a_prompt_that_does_not_fit_holds_back_every_request_behind_it(room: Room) -> None:
    room.traced("one", 30)
    room.traced("two", 40)
    room.traced("three", 5)
    start = room.next(rows=60)
    assert names(start) == ["one"] and start.closed and not start.own


def test_a_prompt_that_is_next_and_does_not_fit_gets_a_step_of_its_own(room: Room) -> None:
    room.traced("one", 40)
    room.traced("two", 20)
    start = room.next(rows=39)
    assert names(start) == ["one", "two"] and start.own, "what the step has left, others may have"


@pytest.mark.parametrize("left", [{"may_own": False}, {"blocks": 0}])
def test_it_waits_when_the_running_requests_cannot_sit_out(room: Room, left: Any) -> None:
    room.traced("one", 40)
    room.plain("two", 5)
    start = room.next(rows=39, **left)
    assert not names(start) and start.closed and not start.own


def test_plain_requests_take_turns_with_traced_requests(room: Room) -> None:
    for number in range(3):
        room.plain(f"plain{number}", 4)
    for number in range(3):
        room.traced(f"traced{number}", 4)
    assert names(room.next(seats=4)) == ["plain0", "traced0", "plain1", "traced1"]


def test_a_plain_prompt_takes_only_what_is_left_and_nothing_starts_behind_it(room: Room) -> None:
    room.plain("long", 100)
    room.traced("one", 10)
    start = room.next()
    assert names(start) == ["long"] and start.closed and not start.own


def test_a_request_that_cannot_start_yet_is_passed_over(room: Room) -> None:
    room.traced("grammar", 10, ready=False)
    room.traced("one", 10)
    assert names(room.next()) == ["one"]


def test_a_prompt_longer_than_a_step_is_cut(room: Room) -> None:
    room.traced("long", 100)
    room.traced("one", 10)
    start = room.next(rows=20)
    assert names(start) == ["long"] and not start.own


def test_smaller_requests_pass_a_request_that_waits_for_the_cache(room: Room) -> None:
    large = room.traced("large", 10, blocks=8)
    room.traced("small", 10, blocks=2)
    room.plain("plain", 5)
    start = room.next(green=10)
    assert names(start) == ["plain", "small"] and start.passed == [large]
    large.passed = MOST_PASSES
    start = room.next(green=10)
    assert names(start) == ["plain"] and start.passed == [large] and not start.closed


def test_what_starts_in_a_step_counts_for_what_is_behind_it(room: Room) -> None:
    room.traced("one", 10, blocks=10)
    room.traced("two", 10, blocks=10)
    assert names(room.next()) == ["one"]


def test_a_tenant_over_its_share_lets_other_tenants_pass(room: Room) -> None:
    half = Flow("red", "s", 0.5)
    room.traced("one", 10, blocks=8, flow=half)
    held = room.traced("two", 10, blocks=1, flow=half)
    room.traced("three", 10, flow=Flow("blue", "s", 0.5))
    start = room.next()
    assert names(start) == ["one", "three"] and start.passed == [held]
    assert names(room.next(red=8)) == ["three"]


def test_seats_follow_the_weights(room: Room) -> None:
    one, two, four = (Flow(name, "s", 1.0, weight) for name, weight in (("one", 1.0), ("two", 2.0), ("four", 4.0)))
    for number in range(8):
        for flow in (one, two, four):
            room.traced(f"{flow.tenant}{number}", 1, blocks=1, flow=flow)
    told = [name[:-1] for name in names(room.next(seats=7))]
    assert [told.count(name) for name in ("one", "two", "four")] == [1, 2, 4]


def test_the_cache_follows_the_weights_where_it_is_what_lacks(room: Room) -> None:
    """A tenant with large requests gets as much of the cache as a tenant with many small ones."""
    large, small = Flow("large", "s"), Flow("small", "s")
    for number in range(4):
        room.traced(f"large{number}", 1, blocks=8, flow=large)
    for number in range(16):
        room.traced(f"small{number}", 1, blocks=2, flow=small)
    started = names(room.next(seats=6))
    assert started == ["large0", "small0", "small1", "small2", "small3"]


@pytest.mark.parametrize(
    ("used", "started"),
    [
        ({"red": 11}, ["other"]),  # red has more than its half already
        ({"red": 2, "blue": 12}, []),  # red would have its half, and its turn has come
        ({"blue": 12}, []),  # red has nothing
    ],
)
def test_a_tenant_that_waits_for_its_own_requests_does_not_keep_others_waiting(
    room: Room, used: dict[str, int], started: list[str]
) -> None:
    waits = room.traced("waits", 10, blocks=6, flow=Flow("red", "s"))
    waits.passed = MOST_PASSES
    room.traced("own", 10, blocks=1, flow=Flow("red", "t"))
    room.traced("other", 10, blocks=1, flow=Flow("blue", "s"))
    start = room.next(**used)
    assert names(start) == started and waits in start.passed


@pytest.mark.parametrize(("used", "started"), [({"red": 9, "blue": 1}, ["other"]), ({"blue": 10}, [])])
def test_a_gang_of_a_tenant_that_has_much_lets_others_pass(
    room: Room, used: dict[str, int], started: list[str]
) -> None:
    for number in range(2):
        room.traced(f"gang/{number}", 10, blocks=4, gang=2, flow=Flow("red", "s"))
    room.traced("other", 10, blocks=1, flow=Flow("blue", "s"))
    assert names(room.next(**used)) == started


def test_a_gang_starts_in_a_step_of_its_own_when_it_is_complete(room: Room) -> None:
    room.traced("gang/0", 20, gang=2)
    room.traced("one", 30)
    assert names(room.next(rows=32)) == ["one"], "other requests pass an incomplete gang"
    room.room.leave(room.room.waiting["one"])
    room.came.pop()
    room.traced("gang/1", 20, gang=2)
    assert not names(room.next(may_own=False)) and room.room.gangs
    start = room.next(rows=60)
    assert names(start) == ["gang/0", "gang/1"] and start.own and not room.room.gangs


def test_a_gang_is_not_torn_apart_for_want_of_room(room: Room) -> None:
    for number in range(2):
        room.traced(f"gang/{number}", 20, blocks=8, gang=2)
    room.traced("one", 5)
    for left in ({"seats": 1}, {"blocks": 1}, {"green": 1}):
        start = room.next(**left)
        assert not names(start) and start.closed and room.room.gangs
    assert names(room.next()) == ["gang/0", "gang/1"]


def test_a_gang_that_fits_no_step_starts_apart(room: Room) -> None:
    room.traced("gang/0", 40, gang=2)
    room.traced("gang/1", 40, gang=2)
    start = room.next()
    assert names(start) == ["gang/0"] and start.closed and not room.room.gangs
    room.came.remove(start.traced[0].request)
    room.room.leave(start.traced[0])
    assert names(room.next()) == ["gang/1"]


def test_a_gang_does_not_wait_for_a_member_that_left(room: Room) -> None:
    left = room.traced("gang/0", 20, gang=3)
    room.room.leave(left)
    room.came.clear()
    room.traced("gang/1", 20, gang=3)
    assert not names(room.next())
    room.traced("gang/2", 20, gang=3)
    assert names(room.next()) == ["gang/1", "gang/2"]
    for entry in list(room.room.waiting.values()):
        room.room.leave(entry)
    assert not room.room.waiting and not room.room.gangs


def test_no_place_is_no_start(room: Room) -> None:
    room.traced("one", 5)
    start = room.next(seats=0)
    assert not names(start) and not start.closed


def test_a_request_without_a_process_waits_and_no_other_does(room: Room) -> None:
    room.traced("one/a", 5, sandboxed=True)
    room.traced("two", 5, sandboxed=True)
    room.traced("one/b", 5, sandboxed=True)
    room.traced("trusted", 5)
    room.plain("plain", 5)
    assert sorted(names(room.next(processes=1))) == ["one/a", "one/b", "plain", "trusted"], "a trace has one process"
    assert sorted(names(room.next(processes=2))) == ["one/a", "one/b", "plain", "trusted", "two"]
    assert sorted(names(room.next(served=("two",)))) == ["plain", "trusted", "two"]


def test_a_gang_without_a_process_waits_and_no_other_does(room: Room) -> None:
    room.traced("one/a", 5, gang=2, sandboxed=True)
    room.traced("one/b", 5, gang=2, sandboxed=True)
    room.plain("plain", 5)
    assert names(room.next()) == ["plain"]
    assert names(room.next(processes=1)) == ["one/a", "one/b", "plain"]
