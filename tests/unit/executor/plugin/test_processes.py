"""How many sandboxed processes the scheduler counts on, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from executor.core.fairness import Flow
from executor.core.request import InvokeRequest
from executor.plugin import processes
from executor.plugin.processes import Processes
from executor.plugin.waiting_room import Traced

FIRST: Any
SECOND: Any
THIRD: Any
FIRST, SECOND, THIRD = (object() for _ in range(3))  # steps


class Asked:
    """A request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


def entry(trace: str, request_id: str = "r") -> Traced:
    request: Any = Asked(request_id)
    return Traced(request, Flow("red", "s"), 1, 1, 1, True, sandboxed=trace)


def test_processes_of_steps_whose_output_is_not_there_are_taken_off() -> None:
    counted = Processes(True, {})
    counted.tell(FIRST, 4)
    counted.give(FIRST, both := [entry("one"), entry("two")], both)
    assert counted.free == 2
    counted.give(SECOND, third := [entry("three")], [*both, *third])
    assert counted.free == 1
    counted.tell(FIRST, 3)  # two were taken, and one has come
    assert counted.free == 2
    counted.tell(SECOND, None)
    assert counted.free == 3
    counted.tell(THIRD, 0)
    assert counted.free == 0


def test_a_trace_takes_one_process_whatever_its_invokes() -> None:
    waits = entry("four", "w")
    counted = Processes(True, {"w": waits})
    counted.tell(FIRST, 4)
    started = [entry("one"), entry("one"), entry(""), entry("two"), waits]
    counted.give(SECOND, started, [*started, entry("two")])
    assert counted.free == 3


def test_a_trace_needs_no_process_if_it_has_one_or_has_waited_long(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: dict[str, Traced] = {}
    counted, running = Processes(True, waiting), entry("runs", "a")
    waiting["b"] = entry(counted.needed("b", InvokeRequest("waits", 0)), "b")
    assert counted.served([running, *waiting.values()]) == {"runs"}
    monkeypatch.setattr(processes, "MOST_SECONDS", 0.0)
    assert counted.served([running, *waiting.values()]) == {"runs", "waits"}


def test_blocks_in_the_worker_need_no_process() -> None:
    assert Processes(True, {}).needed("a", InvokeRequest("t", 0, trusted=True)) == ""
    assert Processes(False, {}).needed("a", InvokeRequest("t", 0)) == ""


def test_a_request_that_finds_the_engine_idle_waits_until_a_step_says_how_many_there_are() -> None:
    counted = Processes(True, {})
    counted.tell(FIRST, 4)
    assert counted.needed("a", InvokeRequest("t", 0), idle=True) == "t"
    counted.needed("b", InvokeRequest("u", 0))
    assert counted.free == 0
    counted.tell(SECOND, None)
    assert counted.free == 4
    counted.needed("c", InvokeRequest("v", 0), idle=True)
    counted.tell(THIRD, 0)  # the process that forks them has ended
    assert counted.free == 0
    counted.needed("d", InvokeRequest("w", 0, trusted=True), idle=True)
    assert not counted.doubted
