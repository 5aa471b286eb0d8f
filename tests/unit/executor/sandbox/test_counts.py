"""The pool counts the processes that it gave to traces, and those of them that were lost."""

from __future__ import annotations

from executor.sandbox.pool import Pool
from tests.unit.executor.sandbox.parts import Worker


def test_processes_are_counted_once(processes: Pool, worker: Worker) -> None:
    before = processes.numbers()
    assert worker.run("h = model.layers[1].output[0].save()").failure is None
    after = processes.numbers()
    assert after["sandbox_starts"] > before["sandbox_starts"] and after["sandbox_kills"] == before["sandbox_kills"]
    assert worker.run("import os\nos._exit(0)").failure is not None
    lost = processes.numbers()
    assert lost["sandbox_starts"] > after["sandbox_starts"]
    assert lost["sandbox_kills"] == processes.numbers()["sandbox_kills"] == after["sandbox_kills"] + 1
