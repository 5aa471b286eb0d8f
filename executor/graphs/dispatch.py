"""Decides for each step which graph it replays, and captures graphs that steps need.

A step without taps and plans is the engine's own. A step that cannot be in a graph runs eager. Every decision depends on the
scheduler's output and on the blocks alone, so all ranks decide alike; whether a capture or a comparison succeeded, they agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from executor.graphs.cache import Entry, GraphCache, Key
from executor.graphs.capture import Captured, CaptureFailed
from executor.graphs.segments import Breaks

# A set of plans is captured when it has been the same for so many steps, or when so many steps have needed the very same graph:
# steps of prompts come one by one.
STABLE = 4
# Breaks of segments, likewise. Blocks that ask for the same again soon find their breaks.
STEADY = 2
# After steps in segments that ended eager, so many steps at most run eager at once.
MOST_PATIENCE = 63
# A new graph also runs the sites that steps asked for last, so many at most: so a mixture of blocks soon has one graph.
RECENT = 48
_MOST_NOTES = 1024  # graphs that could not be had, which are remembered
# A capture that failed is tried again after so many steps, and not after so many failures.
AGAIN, MOST_FAILURES = 256, 3


class Device(Protocol):
    """The graphs of an engine's worker; `executor.plugin` calls it in vLLM's manager of graphs."""

    def capture(self, key: Key) -> Captured:
        """Capture a graph of the uncompiled model with its taps and plans, between two steps.

        Raises:
            CaptureFailed: nothing of the graph stays.
        """

    def replay(self, graph: Any) -> None:
        """Replay a graph on the inputs of the step."""

    def agrees(self, graph: Any, key: Key) -> bool:
        """Replay a graph, run the step eager with hooks, and return whether all values are equal.

        The values of the eager run stay in the outputs, so that the step's results are right in any case.
        """


class Kind(Enum):
    """How a step runs."""

    STOCK = "as the engine's own"
    GRAPH = "in a captured graph"
    SEGMENTS = "in segments of captured graphs"
    EAGER = "eager"


@dataclass(frozen=True)
class Step:
    """What a step needs.

    Attributes:
        descriptor: the sizes of the graph that fits the batch; None if no size fits.
        prompt: whether a request has several rows.
        sites: the sites with open taps.
        plans: the programs of its blocks.
        breaks: of a step in which blocks run as they are, where they are likely to wait; else None.
        general: why a block of the step runs in no graph; "" if every block does.
    """

    descriptor: Hashable | None
    prompt: bool = False
    sites: frozenset[int] = frozenset()
    plans: frozenset[str] = frozenset()
    breaks: Breaks | None = None
    general: str = ""


@dataclass(frozen=True)
class Decision:
    """How a step runs.

    Attributes:
        kind: how.
        entry: the graph.
        why: the reason why it runs eager.
    """

    kind: Kind
    entry: Entry | None = None
    why: str = ""


@dataclass
class Counts:
    """What happened so far.

    Attributes:
        captured, failed, mismatched: captures that succeeded and failed, and graphs whose values were not those of hooks.
        missed: the steps in segments that ended eager, because blocks asked for a location without a break.
        steps: the steps by how they ran; eager steps by the reason.
    """

    captured: int = 0
    failed: int = 0
    mismatched: int = 0
    missed: int = 0
    steps: Counter[str] = field(default_factory=Counter)


@dataclass
class _Broken:
    """Steps in which blocks run as they are.

    Attributes:
        breaks: what the last one asked for.
        since: the first step that asked for the same.
        wait: how many of the coming ones run eager at once.
        patience: how many did so after the last miss.
    """

    breaks: Breaks | None = None
    since: int = 0
    wait: int = 0
    patience: int = 0


@dataclass
class _Planned:
    """Steps with programs.

    Attributes:
        plans: of the last step.
        since: the first step that had the same.
        needed: how many steps went without a graph, by what they needed.
    """

    plans: frozenset[str] = frozenset()
    since: int = 0
    needed: dict[Key, int] = field(default_factory=dict)

    def is_usual(self, key: Key) -> bool:
        """Note that a step needs a graph; return whether enough steps have needed the very same."""
        needed = self.needed.pop(key, 0)
        self.needed[key] = needed + 1
        if len(self.needed) > _MOST_NOTES:
            del self.needed[next(iter(self.needed))]
        return needed >= STABLE


def alone(success: bool) -> bool:
    """Return what the ranks agree on where there is one."""
    return success


class Dispatcher:
    """Decides for one worker.

    Args:
        device: captures and replays.
        cache: the graphs.
        usual: the sites that every graph has, so that few steps need another graph.
        on: whether steps with blocks run in graphs at all.
        prompts: whether a graph can hold prompts: every attention group of the model supports graphs always, and no layer is
            recurrent.
        agree: returns whether a success is one on all ranks.

    Attributes:
        counts: what happened so far.
    """

    def __init__(
        self,
        device: Device,
        cache: GraphCache,
        usual: frozenset[int] = frozenset(),
        *,
        on: bool = True,
        prompts: bool = False,
        agree: Callable[[bool], bool] = alone,
    ) -> None:
        self._device = device
        self._cache = cache
        self._usual = usual
        self._on = on
        self._prompts = prompts
        self._agree = agree
        self._now = 0
        self._planned = _Planned()
        self._broken = _Broken()
        self._failures: dict[Key, tuple[int, int]] = {}  # how many, and the step of the last
        self._wrong: dict[Key, None] = {}
        self._recent: dict[int, None] = {}  # the sites that steps asked for, the last asked at the end
        self._unchecked: dict[Entry, Key] = {}  # what the step wanted that a graph was captured for
        self.counts = Counts()

    def decide(self, step: Step) -> Decision:
        """Return how a step runs; at most one graph is captured. Called once a step."""
        self._now += 1
        self._cache.reap()
        if step.plans != self._planned.plans:
            self._planned.plans, self._planned.since = step.plans, self._now
        if step.breaks is not None and step.breaks != self._broken.breaks:
            self._broken.breaks, self._broken.since = step.breaks, self._now
        decision = self._decide(step)
        self.counts.steps[decision.why or decision.kind.value] += 1
        return decision

    def numbers(self) -> dict[str, float]:
        """Return what happened so far, and what the cache holds, by name."""
        counts, cache = self.counts, self._cache
        steps = counts.steps
        in_graphs = steps[Kind.GRAPH.value] + steps[Kind.SEGMENTS.value]
        return {
            "graphs_captured": counts.captured,
            "graphs_failed": counts.failed,
            "graphs_mismatched": counts.mismatched,
            "graphs_evicted": cache.evicted,
            "steps_in_graphs": in_graphs,
            "steps_eager": steps.total() - in_graphs - steps[Kind.STOCK.value],
            "graphs": len(cache),
            "graph_bytes": cache.size,
        }

    def repeat(self) -> None:
        """Note a step that replays the graph of the last step."""
        self._now += 1
        self.counts.steps[Kind.GRAPH.value] += 1

    def _decide(self, step: Step) -> Decision:
        if step.general:
            return Decision(Kind.EAGER, why=step.general)
        if not step.sites and not step.plans and step.breaks is None:
            return Decision(Kind.STOCK)
        if not self._on:
            return Decision(Kind.EAGER, why="graphs with blocks are off")
        if step.descriptor is None:
            return Decision(Kind.EAGER, why="no graph is large enough for the batch")
        if step.prompt and not self._prompts:
            return Decision(Kind.EAGER, why="the model's attention allows no prompts in graphs")
        if step.breaks is not None:
            return self._in_segments(step, step.breaks)
        for site in step.sites:
            self._recent.pop(site, None)
            self._recent[site] = None
        entry = self._cache.find(Key(step.descriptor, step.sites, step.plans))
        if entry is None:
            entry, why = self._capture(Key(step.descriptor, step.sites | self._usual, step.plans))
            if entry is None:
                return Decision(Kind.EAGER, why=why)
        return Decision(Kind.GRAPH, entry)

    def _in_segments(self, step: Step, breaks: Breaks) -> Decision:
        """Return how a step runs in which blocks run as they are."""
        if step.plans:
            return Decision(Kind.EAGER, why="programs run beside blocks that run as they are")
        if self._broken.wait:
            self._broken.wait -= 1
            return Decision(Kind.EAGER, why="blocks asked for locations without a break")
        key = Key(step.descriptor, step.sites, breaks=breaks)
        entry = self._cache.find(key)
        if entry is None:
            entry, why = self._capture(key)
            if entry is None:
                return Decision(Kind.EAGER, why=why)
        return Decision(Kind.SEGMENTS, entry)

    def ran(self, complete: bool) -> None:
        """Note whether a step in segments ended so. After misses, steps run eager at once."""
        if complete:
            self._broken.patience = 0
            return
        self.counts.missed += 1
        self._broken.patience = min(2 * self._broken.patience + 1, MOST_PATIENCE)
        self._broken.wait = self._broken.patience

    def _capture(self, key: Key) -> tuple[Entry | None, str]:
        """Capture a graph that serves a step; return it, or why there is none."""
        if key in self._wrong:
            return None, "a graph of this step had other values than hooks"
        if key.plans and self._now - self._planned.since < STABLE and not self._planned.is_usual(key):
            return None, "the plans of the batch have just changed"
        if key.breaks is not None and self._now - self._broken.since < STEADY:
            return None, "what blocks ask for has just changed"
        failures, last = self._failures.get(key, (0, 0))
        if failures >= MOST_FAILURES or (failures and self._now - last < AGAIN):
            return None, "no graph of this step could be captured"
        recent = frozenset(list(self._recent)[-RECENT:]) if key.breaks is None or key.sites else frozenset()
        wider = replace(key, sites=key.sites | recent)
        try:
            captured: Captured | None = self._device.capture(wider)
        except CaptureFailed:
            captured = None
        if not self._agree(captured is not None) or captured is None:
            return None, self._failed(key, failures)
        entry = self._cache.add(wider, captured.graph, captured.size)
        if not self._agree(entry is not None) or entry is None:
            if entry is not None:
                self._cache.drop(entry)
            return None, self._failed(key, failures)
        self._failures.pop(key, None)
        self._planned.needed.pop(key, None)
        self._unchecked[entry] = key
        self.counts.captured += 1
        return entry, ""

    def _failed(self, key: Key, failures: int) -> str:
        self._failures[key] = (failures + 1, self._now)
        if len(self._failures) > _MOST_NOTES:
            del self._failures[next(iter(self._failures))]
        self.counts.failed += 1
        return "the capture of a graph failed"

    def run(self, entry: Entry) -> None:
        """Run the step in a graph.

        The first step of a graph is compared with hooks; a graph with other values is dropped.
        """
        if entry.checked:
            self._device.replay(entry.graph)
        else:
            self.check(entry)

    def check(self, entry: Entry) -> bool:
        """Compare a graph with hooks, once; return whether it is right."""
        if entry.checked:
            return True
        wanted = self._unchecked.pop(entry, entry.key)
        if self._agree(self._device.agrees(entry.graph, entry.key)):
            entry.checked = True
            return True
        self.counts.mismatched += 1
        self._wrong[wanted] = None
        if len(self._wrong) > _MOST_NOTES:
            del self._wrong[next(iter(self._wrong))]
        self._cache.drop(entry)
        return False

    def forget(self, plan: str) -> None:
        """Drop the graphs with a program that is gone, by its key."""
        self._cache.forget(plan)

    def clear(self) -> None:
        """Drop all graphs, because memory that they use was allocated anew."""
        self._cache.clear()
        self._failures.clear()
        self._wrong.clear()
        self._planned.needed.clear()
        self._unchecked.clear()
