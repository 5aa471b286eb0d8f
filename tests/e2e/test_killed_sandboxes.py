"""Processes of strangers' blocks are killed under a client's hands: their traces fail, and no other trace does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import interpose
from benchmarks.processes import zygotes
from executor.sandbox.pool import READY
from interpose.contract.errors import InterposeError
from tests.cluster.matrix import FAULTS, Seen, There, leaks, report, shown
from tests.e2e.service import RunningService, wait_for

pytestmark = pytest.mark.timeout(500)


@pytest.fixture
def model(second: RunningService) -> Iterator[interpose.Model]:
    """A stranger's model, whose sandboxes are all there."""
    with interpose.connect(second.address, api_key="red-key-1", progress=False) as client:
        model = client.model("tiny")
        runs(model)
        wait_for(lambda: complete(second), 120)
        yield model


def runs(model: interpose.Model) -> None:
    """Run a trace."""
    with model.trace("one two three"):
        hidden = model.model.layers[0].output[0].save()
    assert hidden.shape[-1] == 128


def scans(model: interpose.Model) -> None:
    """Run a block on shapes, which is no request that the scheduler knows."""
    with model.scan("one two three"):
        model.model.layers[0].output[0].shape


def sandboxes(service: RunningService) -> tuple[list[psutil.Process], list[psutil.Process]]:
    return zygotes(service.processes())


def complete(service: RunningService) -> bool:
    """Return whether there is one zygote, and as many processes as wait for traces."""
    first, forked = sandboxes(service)
    return len(first) == 1 and len(forked) == READY


@pytest.mark.parametrize("part", ["zygote", "process"])
def test_a_part_of_the_sandbox_that_is_killed(second: RunningService, model: interpose.Model, part: str) -> None:
    before = There.of(second)
    with model.trace("one two three", max_tokens=500, ignore_eos=True, blocking=False) as tracer:
        for _step in tracer.iter[:]:
            rows = model.model.layers[0].output[0]
            rows[:] *= 1.0
    wait_for(lambda: any(one.running for one in second.status().models), 20)
    wait_for(lambda: len(sandboxes(second)[1]) == READY + 1, 20)
    [zygote], forked = sandboxes(second)
    killed = time.monotonic()
    (zygote if part == "zygote" else forked[0]).kill()  # a trace has the process that has waited longest
    with pytest.raises(InterposeError) as lost:
        tracer.job.wait(timeout=60)
        tracer.job.result()
    saw = time.monotonic() - killed
    runs(model)  # it waits for a process
    back = time.monotonic() - killed
    tracer.job.forget()
    wait_for(lambda: complete(second), 60)
    fault = FAULTS[12] if part == "zygote" else FAULTS[13]
    report(Seen(fault, shown(lost.value), saw, back, 0, leaks(second, before)))


def test_traces_that_find_a_killed_zygote_wait_for_the_next(second: RunningService, model: interpose.Model) -> None:
    """The zygote ends while no request is there, so that no step says so; as many traces start as processes were ready."""
    [zygote], forked = sandboxes(second)
    zygote.kill()
    # What starts in the very moment of the kill is to be submitted again.
    wait_for(
        lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in (zygote, *forked)), 20
    )
    gone = zygote.pid
    with ThreadPoolExecutor(READY + 1) as threads:
        for done in [threads.submit(runs, model) for _ in range(READY)] + [threads.submit(scans, model)]:
            done.result(timeout=120)
    wait_for(lambda: complete(second), 60)
    [zygote], _ = sandboxes(second)
    assert zygote.pid != gone
