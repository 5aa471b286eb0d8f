"""Which step replays which graph, on a device that only notes what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from executor.graphs.cache import GraphCache, Key
from executor.graphs.capture import Captured, CaptureFailed
from executor.graphs.dispatch import AGAIN, MOST_FAILURES, RECENT, STABLE, Dispatcher, Kind, Step


@dataclass
class Noted:
    """A device.

    Attributes:
        did: what it was told.
        fails: the next captures that fail.
        wrong: the graphs whose values are not those of hooks.
        size: of each graph.
    """

    did: list[Any] = field(default_factory=list)
    fails: int = 0
    wrong: set[str] = field(default_factory=set)
    size: int = 10

    def capture(self, key: Key) -> Captured:
        self.did.append(("capture", key))
        if self.fails:
            self.fails -= 1
            raise CaptureFailed("no memory", out_of_memory=True)
        return Captured(f"graph of {key.descriptor}", self.size)

    def replay(self, graph: Any) -> None:
        self.did.append(("replay", graph))

    def agrees(self, graph: Any, key: Key) -> bool:
        self.did.append(("compare", graph))
        return graph not in self.wrong

    def take(self) -> list[str]:
        done = [name for name, _ in self.did]
        self.did.clear()
        return done


def step(descriptor: int | None = 8, *sites: int, **rest: Any) -> Step:
    return Step(descriptor, sites=frozenset(sites), **rest)


def make(device: Noted, most: int = 16, **rest: Any) -> Dispatcher:
    return Dispatcher(device, GraphCache(most, 1000), frozenset({0, 1}), **rest)


def go(dispatcher: Dispatcher, one: Step) -> Kind:
    decision = dispatcher.decide(one)
    if decision.entry is not None:
        dispatcher.run(decision.entry)
    return decision.kind


def test_a_step_without_taps_is_the_engines_own() -> None:
    device = Noted()
    assert go(make(device), step()) is Kind.STOCK
    assert go(make(device, on=False), step()) is Kind.STOCK
    assert device.take() == []


def test_a_graph_is_captured_once_compared_once_and_replayed_then() -> None:
    device = Noted()
    dispatcher = make(device)
    for _ in range(3):
        assert go(dispatcher, step(8, 1)) is Kind.GRAPH
    assert device.take() == ["capture", "compare", "replay", "replay"]
    assert dispatcher.counts.captured == 1
    assert dispatcher.counts.steps == {"in a captured graph": 3}
    numbers = dispatcher.numbers()
    assert (numbers["steps_in_graphs"], numbers["steps_eager"], numbers["graphs_captured"]) == (
        3,
        0,
        dispatcher.counts.captured,
    )


def test_graphs_have_the_usual_sites_and_so_serve_other_requests() -> None:
    device = Noted()
    dispatcher = make(device)
    go(dispatcher, step(8, 1))
    go(dispatcher, step(8, 0))
    go(dispatcher, step(8, 0, 7))
    captured = [key for name, key in device.did if name == "capture"]
    assert [set(key.sites) for key in captured] == [{0, 1}, {0, 1, 7}]


def test_graphs_grow_to_what_a_mixture_of_steps_asks_for() -> None:
    device = Noted()
    dispatcher = make(device)
    for sites in ((2,), (3,), (2, 3), (4,), (2,), (3, 4), (2, 3, 4)):
        assert go(dispatcher, step(8, *sites)) is Kind.GRAPH
    captured = [set(key.sites) for name, key in device.did if name == "capture"]
    assert captured == [{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]
    for site in range(100, 200):
        go(dispatcher, step(8, site))
    assert max(len(key.sites) for name, key in device.did if name == "capture") <= RECENT + 2


@pytest.mark.parametrize(
    ("one", "options", "why"),
    [
        (step(None, 1), {}, "no graph is large enough for the batch"),
        (step(8, 1, prompt=True), {}, "the model's attention allows no prompts in graphs"),
        (step(8, 1), {"on": False}, "graphs with blocks are off"),
        (step(8, 1, general="line 3: a barrier"), {"prompts": True}, "line 3: a barrier"),
        (step(8, general="line 3: a barrier"), {}, "line 3: a barrier"),
    ],
)
def test_a_step_that_no_graph_can_hold_runs_eager(one: Step, options: dict[str, Any], why: str) -> None:
    device = Noted()
    dispatcher = make(device, **options)
    decision = dispatcher.decide(one)
    assert (decision.kind, decision.why) == (Kind.EAGER, why)
    assert device.take() == [] and dispatcher.counts.steps == {why: 1}
    assert (dispatcher.numbers()["steps_in_graphs"], dispatcher.numbers()["steps_eager"]) == (0, 1)


def test_prompts_run_in_graphs_where_attention_allows_it() -> None:
    assert go(make(Noted(), prompts=True), step(64, 1, prompt=True)) is Kind.GRAPH


def test_a_capture_without_memory_fails_alone() -> None:
    device = Noted(fails=1)
    dispatcher = make(device)
    assert go(dispatcher, step(8, 1)) is Kind.EAGER
    assert go(dispatcher, step(16, 1)) is Kind.GRAPH
    assert dispatcher.counts.failed == 1


def test_a_failed_capture_is_tried_again_later_and_not_for_ever() -> None:
    device = Noted(fails=MOST_FAILURES)
    dispatcher = make(device)
    tries = []
    for number in range(MOST_FAILURES * AGAIN + 2 * AGAIN):
        assert go(dispatcher, step(8, 1)) is Kind.EAGER
        if device.take():
            tries.append(number)
    assert tries == [0, AGAIN, 2 * AGAIN]


def test_a_capture_that_succeeds_later_counts_no_failure() -> None:
    device = Noted(fails=1)
    dispatcher = make(device)
    kinds = [go(dispatcher, step(8, 1)) for _ in range(AGAIN + 2)]
    assert kinds[-2:] == [Kind.GRAPH, Kind.GRAPH] and set(kinds[:-2]) == {Kind.EAGER}


def test_a_graph_with_other_values_is_dropped_and_not_captured_again() -> None:
    device = Noted(wrong={"graph of 8"})
    dispatcher = make(device)
    assert go(dispatcher, step(8, 1)) is Kind.GRAPH
    assert dispatcher.counts.mismatched == 1
    for _ in range(2 * AGAIN):
        assert go(dispatcher, step(8, 1)) is Kind.EAGER
    assert device.take() == ["capture", "compare"]
    assert go(dispatcher, step(16, 1)) is Kind.GRAPH


def test_plans_are_captured_when_their_set_is_stable() -> None:
    device = Noted()
    dispatcher = make(device)
    one, two = (step(8, plans=frozenset({name})) for name in "pq")
    kinds = [go(dispatcher, one) for _ in range(STABLE + 1)]
    assert kinds == [Kind.EAGER] * STABLE + [Kind.GRAPH]
    assert go(dispatcher, two) is Kind.EAGER
    assert go(dispatcher, one) is Kind.GRAPH
    assert device.take() == ["capture", "compare", "replay"]


def test_a_graph_that_steps_need_again_and_again_is_captured_too() -> None:
    """Prompts with a plan come one by one, with plain steps in between."""
    device = Noted()
    dispatcher = make(device, prompts=True)
    prompt = step(64, prompt=True, plans=frozenset("p"))
    kinds = []
    for _ in range(STABLE + 2):
        kinds.append(go(dispatcher, prompt))
        go(dispatcher, step(8))
    assert kinds == [Kind.EAGER] * STABLE + [Kind.GRAPH] * 2


def test_ranks_agree_on_captures_and_comparisons() -> None:
    for capture_agreed, kept_agreed, same_agreed, did, kind in (
        (False, True, True, ["capture"], Kind.EAGER),
        (True, False, True, ["capture"], Kind.EAGER),
        (True, True, False, ["capture", "compare"], Kind.GRAPH),
    ):
        device = Noted()
        answers = iter([capture_agreed, kept_agreed, same_agreed])
        dispatcher = make(device, agree=lambda success, answers=answers: success and next(answers))
        assert go(dispatcher, step(8, 1)) is kind
        assert device.take() == did
        assert go(dispatcher, step(8, 1)) is Kind.EAGER


def test_a_graph_beyond_all_memory_counts_as_failed() -> None:
    dispatcher = make(Noted(size=1001))
    assert go(dispatcher, step(8, 1)) is Kind.EAGER
    assert dispatcher.counts.failed == 1


def test_an_evicted_graph_is_captured_and_compared_again() -> None:
    device = Noted()
    dispatcher = make(device, most=1)
    for size in (8, 16, 8):
        go(dispatcher, step(size, 1))
    assert device.take() == ["capture", "compare"] * 3


def test_all_graphs_go_when_memory_is_allocated_anew() -> None:
    device = Noted(wrong={"graph of 8"})
    dispatcher = make(device)
    go(dispatcher, step(8, 1))
    device.wrong.clear()
    dispatcher.clear()
    assert go(dispatcher, step(8, 1)) is Kind.GRAPH
    assert device.take() == ["capture", "compare"] * 2
