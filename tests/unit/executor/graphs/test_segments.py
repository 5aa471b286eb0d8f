"""Breaks of a pass, what they remember, and chains of graphs; CUDA is a recorder that runs the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from executor.graphs.cache import GraphCache, Key
from executor.graphs.capture import capture
from executor.graphs.chain import Chain, Segmented
from executor.graphs.dispatch import STEADY, Dispatcher, Kind, Step
from executor.graphs.segments import MOST_BREAKS, REMEMBERED, Asked, Break, Breaks, run
from executor.model.hooks import Hooks, Spot
from executor.model.node import Node
from executor.model.tree import ModuleTree
from tests.unit.executor.graphs.test_dispatch import Noted
from tests.unit.executor.graphs.toy import HIDDEN, Toy

ROWS, USED = 8, 6
QKV, FIRST, LAST = ("layers.1.qkv", "output"), ("layers.0", "output"), ("layers.2", "output")
INPUT = ("layers.1.qkv", "input")


def test_breaks_are_those_of_recent_steps() -> None:
    asked = Asked()
    asked.note([FIRST, LAST], [LAST])
    first = asked.breaks
    assert first == Breaks(frozenset({FIRST, LAST}), frozenset({LAST}))
    for _ in range(REMEMBERED):
        asked.note([FIRST], [])
    assert asked.breaks is first
    asked.note([FIRST], [])
    assert asked.breaks == Breaks(frozenset({FIRST}))
    asked.note([(f"layers.{i}", "input") for i in range(2 * MOST_BREAKS)], [])
    assert len(asked.breaks.spots) == MOST_BREAKS and FIRST not in asked.breaks.spots


def test_a_chain_serves_steps_that_need_fewer_breaks() -> None:
    cache = GraphCache(8, 1000)
    many, few = Breaks(frozenset({FIRST, QKV, LAST}), frozenset({QKV})), Breaks(frozenset({FIRST, LAST}))
    plain = cache.add(Key(8, frozenset({1})), "plain", 1)
    wide = cache.add(Key(8, breaks=many), "wide", 1)
    narrow = cache.add(Key(8, breaks=few), "narrow", 1)
    tapped = cache.add(Key(8, frozenset({1}), breaks=many), "tapped", 1)
    assert cache.find(Key(8, breaks=Breaks(frozenset({FIRST})))) is narrow
    assert cache.find(Key(8, breaks=Breaks(frozenset({QKV})))) is wide
    assert cache.find(Key(8, breaks=Breaks(frozenset({FIRST}), frozenset({FIRST})))) is None
    assert cache.find(Key(8, frozenset({1}), breaks=few)) is tapped
    assert cache.find(Key(8, frozenset({1}))) is plain


def test_steps_with_blocks_run_in_segments_when_they_ask_for_the_same() -> None:
    device = Noted()
    dispatcher = Dispatcher(device, GraphCache(16, 1000), frozenset({0}), prompts=True)
    breaks = Breaks(frozenset({FIRST}))

    def kind(**rest: Any) -> Kind:
        return dispatcher.decide(Step(8, breaks=breaks, **rest)).kind

    assert [kind() for _ in range(STEADY + 1)] == [Kind.EAGER] * STEADY + [Kind.SEGMENTS]
    assert device.did == [("capture", Key(8, breaks=breaks))]
    assert kind(plans=frozenset({"p"})) is Kind.EAGER
    assert kind(general="a reason") is Kind.EAGER
    assert dispatcher.decide(Step(None, breaks=breaks)).kind is Kind.EAGER
    assert kind(sites=frozenset({3})) is Kind.SEGMENTS  # another chain, with the tables
    entry = dispatcher.decide(Step(8, breaks=breaks)).entry
    assert entry is not None and dispatcher.check(entry) and dispatcher.check(entry)
    assert device.take().count("compare") == 1


def test_after_misses_steps_run_eager_ever_longer() -> None:
    dispatcher = Dispatcher(Noted(), GraphCache(16, 1000))
    step = Step(8, breaks=Breaks(frozenset({FIRST})))

    def eager() -> int:
        count = 0
        while dispatcher.decide(step).kind is Kind.EAGER:
            count += 1
        return count

    assert eager() == STEADY
    waited = []
    for _ in range(8):
        dispatcher.ran(False)
        waited.append(eager())
    assert waited == [1, 3, 7, 15, 31, 63, 63, 63] and dispatcher.counts.missed == 8
    dispatcher.ran(True)
    dispatcher.ran(False)
    assert eager() == 1


class Live:
    """A pass of the toy model, run anew at each break up to there: what comes after it is computed of what is there."""

    def __init__(self, forward: Callable[[], torch.Tensor], tree: ModuleTree, breaks: Breaks) -> None:
        import greenlet

        self.spots = breaks.spots
        self.output: Any = None
        self._breaks = breaks
        self._hooks = Hooks(tree, self._come)
        for spot in breaks.spots:
            self._hooks.add(*spot)
        self._inside = greenlet.greenlet(lambda: setattr(self, "output", forward()))
        self._outside = greenlet.getcurrent()

    def go_on(self) -> Break | None:
        at: Break | None = self._inside.switch()
        if at is None:
            self._hooks.clear()
        return at

    def give_up(self) -> None:
        self._inside.throw()
        self._hooks.clear()

    def _come(self, node: Node, kind: str, value: Any) -> Any:
        spot = (node.path, kind)
        at = Break.of(spot, [(node, kind, value)], spot in self._breaks.apart, ROWS)
        self._outside.switch(at)
        at.keep()
        return at.onward


def change(how: str, value: Any) -> Any:
    """Return what a block makes of an output of the toy model, in place or anew."""
    first = value[0] if isinstance(value, tuple) else value
    first = first[0] if isinstance(first, tuple) else first  # the arguments of a module
    if how == "in place":
        first[1:3] *= 0.5
        return value
    if how == "assigned":
        new = first.clone()
        new[1:3] += 1
        if isinstance(value, tuple) and isinstance(value[0], tuple):
            return ((new, *value[0][1:]), value[1])
        return (new, *value[1:]) if isinstance(value, tuple) else new
    return value


@pytest.mark.parametrize(
    "breaks", [(), (FIRST,), (FIRST, LAST), (FIRST, INPUT, LAST), (FIRST, INPUT, QKV, LAST)], ids=len
)
@pytest.mark.parametrize("apart", [False, True], ids=["in place", "apart"])
@pytest.mark.parametrize(
    "does",
    [
        {FIRST: "in place", LAST: ""},
        {FIRST: "assigned", LAST: ""},
        {FIRST: "assigned", INPUT: "in place", QKV: "assigned", LAST: "in place"},
        {INPUT: "assigned", LAST: ""},
        {QKV: "in place"},
    ],
    ids=str,
)
def test_a_step_ends_like_an_eager_one_wherever_it_breaks(
    breaks: tuple[Spot, ...], apart: bool, does: dict[Spot, str]
) -> None:
    """A block asks for one location after the other, some of which have no break, and sees each once."""
    torch.manual_seed(0)
    toy = Toy()
    tree = ModuleTree(toy, 1)
    given = torch.randn(ROWS, HIDDEN)

    def stepped(where: Breaks | None) -> tuple[torch.Tensor, list[Any], bool]:
        seen: list[Any] = []
        asked = iter(does)

        def visit(node: Node, kind: str, value: Any) -> Any:
            seen.append((node.path, kind, [one.clone() for one in leaves(value)]))
            made = change(does[node.path, kind], value)
            for spot in asked:
                hooks.add(*spot)
                break
            return made

        hooks = Hooks(tree, visit)
        outputs: list[torch.Tensor] = []

        def begin() -> None:
            hooks.begin_step()
            hooks.add(*next(asked))

        segments = None if where is None else Live(lambda: toy(given.clone()), tree, where)
        complete = run(segments, hooks, begin, lambda: outputs.append(toy(given.clone())))
        hooks.clear()
        assert complete == (not outputs)
        return outputs[0] if segments is None or outputs else segments.output, seen, complete

    with torch.no_grad():
        truth, expected, _ = stepped(None)
        output, seen, complete = stepped(Breaks(frozenset(breaks), frozenset(breaks) if apart else frozenset()))
    assert torch.equal(output, truth)
    assert [one[:2] for one in seen] == [one[:2] for one in expected] == [*does]
    for (_, _, mine), (_, _, theirs) in zip(seen, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert complete == (set(does) <= set(breaks) and (apart or "assigned" not in does.values()))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in toy.modules())


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from leaves(item)


def test_an_assigned_value_of_another_shape_ends_the_segments() -> None:
    """What the eager pass makes of such a value is what any hook's value of that shape makes."""
    at = Break.of(FIRST, [(ModuleTree(Toy(), 1).nodes["layers.0"], "output", (torch.ones(ROWS, 4), None))], True, ROWS)
    assert at.apart and at.onward[1] is None
    toy = Toy()
    tree = ModuleTree(toy, 1)
    wrong = torch.zeros(ROWS, HIDDEN + 1)
    hooks = Hooks(tree, lambda node, kind, value: (wrong, value[1]))
    breaks = Breaks(frozenset({FIRST}), frozenset({FIRST}))
    given = torch.randn(ROWS, HIDDEN)

    def begin() -> None:
        hooks.begin_step()
        hooks.add(*FIRST)

    with pytest.raises(RuntimeError, match="size of tensor"), torch.no_grad():
        run(Live(lambda: toy(given), tree, breaks), hooks, begin, lambda: toy(given))
    hooks.clear()


class Recorded:
    """Stands in for CUDA: a graph notes which segment it is."""

    def __init__(self, fails_at: int = -1) -> None:
        self.did: list[str] = []
        self._fails_at = fails_at
        self._count = 0

    def free(self) -> int:
        return 1000

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        yield

    def wait(self) -> None:
        pass

    def begin(self) -> Any:
        if self._count == self._fails_at:
            raise RuntimeError("no graph")
        self._count += 1
        self.did.append(f"begin {self._count}")
        return Replayed(self._count, self.did)

    def end(self, graph: Replayed) -> None:
        self.did.append(f"end {graph.number}")


class Replayed:
    def __init__(self, number: int, did: list[str]) -> None:
        self.number = number
        self._did = did

    def replay(self) -> None:
        self._did.append(f"replay {self.number}")


def test_a_chain_is_a_graph_more_than_breaks_and_begins_anew_in_each_step() -> None:
    torch.manual_seed(0)
    toy, given = Toy(), torch.randn(ROWS, HIDDEN)
    recorder = Recorded()
    breaks = Breaks(frozenset({FIRST, INPUT, LAST}), frozenset({INPUT}))
    segmented = Segmented(recorder, ModuleTree(toy, 1), breaks, ROWS)
    with torch.no_grad(), segmented.hooked():
        chain: Chain = capture(segmented, lambda: lambda: toy(given), warm=True).graph
    assert recorder.did == ["begin 1", "end 1", "begin 2", "end 2", "begin 3", "end 3", "begin 4", "end 4"]
    assert [at.spot for at in chain.at] == [FIRST, INPUT, LAST]
    assert [at.apart for at in chain.at] == [False, True, False]
    recorder.did.clear()
    for _ in range(2):
        chain.begin()
        assert [chain.go_on() for _ in range(4)] == [*chain.at, None]
    assert recorder.did == [f"replay {i}" for i in (1, 2, 3, 4)] * 2
    chain.at[2].before[0].fill_(-1.0)  # the memory may hold what an earlier test left there
    with torch.no_grad():
        with chain.compared(ModuleTree(toy, 1), USED) as found:
            toy(given)
        assert found == [True, True, False]  # nothing was copied beside the input when the last was captured
        chain.at[0].before[0][USED:] += 1
        with chain.compared(ModuleTree(toy, 1), USED) as found:
            toy(given)
        assert found[0]
        chain.at[0].before[0][USED - 1] += 1
        with chain.compared(ModuleTree(toy, 1), USED) as found:
            toy(given)
        assert not found[0]


def test_a_capture_that_fails_at_a_break_leaves_nothing() -> None:
    from executor.graphs.capture import CaptureFailed

    toy, given = Toy(), torch.randn(ROWS, HIDDEN)
    segmented = Segmented(Recorded(fails_at=1), ModuleTree(toy, 1), Breaks(frozenset({FIRST})), ROWS)
    with pytest.raises(CaptureFailed, match="no graph"), torch.no_grad(), segmented.hooked():
        capture(segmented, lambda: lambda: toy(given), warm=False)
    assert not any(module._forward_hooks for module in toy.modules())
