"""Replicas and models come and go while traces run: none is dropped, and a session goes on with what it has."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import interpose
from interpose.contract.errors import Unavailable
from tests.e2e.service import Joining, RunningService, wait_for
from tests.e2e.test_fidelity import PROMPTS, Served, check_everything, read_everything
from tests.oracle import Oracle

PROMPT = "one two three"
STEPS = 100
# Process titles of the service's own replicas: of its ingress, and of those that have an engine.
INGRESS = "ServeReplica:interpose:ingress"
ENGINES = "ServeReplica:interpose:engine-"

# Adds a model beside the service, and takes it away at the next line that it is given.
_MORE = """
import json, sys, ray
from ray import serve
from serve_app.app import build_model
ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
serve.run(build_model(json.loads(sys.argv[1])), name="more", route_prefix=None)
print("runs", flush=True)
sys.stdin.readline()
serve.delete("more", _blocking=False)
print("is on its way out", flush=True)
sys.stdin.readline()
"""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def more(second: RunningService, checkpoints: dict[str, Path]) -> Iterator[Joining]:
    """Another model, which begins to load with the first test, while that waits for a replica anyway."""
    engine = {"dtype": "float32", "enforce_eager": True}
    model = {"name": "gpt2", "model": str(checkpoints["gpt2"]), "engine": engine, "drain_seconds": 200.0}
    with second.joining(_MORE, json.dumps(model)) as process:
        yield process


@pytest.fixture
def clients(second: RunningService) -> Iterator[Callable[[], interpose.Client]]:
    """Connects clients, each with a session of its own."""
    opened: list[interpose.Client] = []

    def connect() -> interpose.Client:
        opened.append(interpose.connect(second.address, api_key="red-key-1", progress=False))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


class Slow(threading.Thread):
    """A trace beside everything else, which takes a second for each of its steps until it is let go.

    Args:
        model: where it runs, in its client's session.
        hold: a file that the blocks, which run on this machine, look at.
    """

    def __init__(self, model: interpose.Model, hold: Path) -> None:
        super().__init__(daemon=True)
        self._model = model
        self._hold = hold
        self._error: Exception | None = None
        self._seen: list[int] = []
        hold.touch()
        self.start()
        wait_for(hold.with_suffix(".runs").exists, 60)

    def run(self) -> None:
        model, hold, seen = self._model, str(self._hold), self._seen
        try:
            with model.trace(PROMPT, max_tokens=STEPS, ignore_eos=True, temperature=0.0) as tracer:
                for step in tracer.iter[:]:
                    seen.append(step)
                    logits = model.logits.output.save()
                    if os.path.exists(hold):
                        open(hold + ".runs", "w").close()
                        time.sleep(1.0)
                interpose.save(seen)
            self._logits = logits
        except Exception as error:
            self._error = error

    def let_go(self, expected: torch.Tensor) -> None:
        """It was running until now, and ends as it should."""
        assert self.is_alive()
        self._hold.unlink()
        self.join(300)
        assert self._error is None and self._seen == list(range(STEPS))
        assert (self._logits - expected).abs().max() < 1e-4


def last_logits(model: interpose.Model) -> torch.Tensor:
    """What a `Slow` ends with."""
    with model.trace(PROMPT, max_tokens=STEPS, ignore_eos=True, temperature=0.0) as tracer:
        for _step in tracer.iter[:]:
            logits = model.logits.output.save()
    return logits


def slow_job(model: interpose.Model) -> interpose.Job:
    """A trace that takes minutes, running."""
    with model.trace(PROMPT, max_tokens=400, ignore_eos=True, blocking=False) as tracer:
        for _step in tracer.iter[:]:
            time.sleep(0.3)
    job = tracer.job
    wait_for(lambda: job.status().state == "running", 60)
    return job


def place_of(model: interpose.Model) -> int:
    """The process that a trace of the model's session runs in."""
    with model.trace(PROMPT):
        pid = [os.getpid()].save()
    return int(pid[0])


def kept_where_it_was(model: interpose.Model) -> tuple[int, interpose.RemoteValue]:
    """The same, and a value that stays on the server."""
    with model.trace(PROMPT, fetch=False):
        pid = [os.getpid()].save()
        kept = model.model.layers[1].output[0].save()
    return int(pid[0]), kept


def each(client: interpose.Client) -> list[Any]:
    """The replicas of the model `tiny` that can run traces."""
    (tiny,) = [one for one in client.status().models if one.name == "tiny"]
    return [one for one in tiny.each if not one.stage]


def test_a_session_stays_at_its_replica_and_goes_on_with_another_when_that_is_removed(
    second: RunningService, clients: Callable[[], interpose.Client], more: Joining, tmp_path: Path
) -> None:
    a, b = clients(), clients()
    on_a, on_b = a.model("tiny"), b.model("tiny")
    with on_a.edit("double"):
        on_a.model.layers[1].mlp.output[:] *= 2
    first = place_of(on_a)
    assert place_of(on_b) == first and len(each(a)) == 1
    # Four traces at a time are more than one replica should have: Serve counts them for as long as they run.
    jobs = [slow_job(model) for model in (on_a, on_a, on_b, on_b)]
    wait_for(lambda: len(each(a)) == 2, 300)
    wait_for(lambda: sorted(one.running for one in each(a)) == [0, 4], 20)

    c, another = client_elsewhere(clients, first)
    on_c = c.model("tiny")
    assert place_of(on_a) == first
    assert [place_of(on_c) for _ in range(3)] == [another] * 3
    assert sorted(one.sessions for one in each(a)) == [1, 2]
    assert check_edit(on_c) == another and check_edit(on_a) == first
    with on_c.trace(PROMPT, max_tokens=3, ignore_eos=True, stream=True) as tracer:
        norms = [].save()
        for _step in tracer.iter[:]:
            norms.append(on_c.model.layers[2].output[0][-1].norm())
    assert [len(out.saves["norms"]) for out in tracer.stream()][-1] == 3
    found = a.job(slow_job(on_c).id)  # by another client than the one that submitted it
    assert found.status().state == "running" and found.cancel()
    found.forget()

    # With less to do Serve removes the newer replica, at which c's trace runs.
    expected = last_logits(on_c)
    slow = Slow(on_c, tmp_path / "slow")
    held = [kept_where_it_was(on_c)]
    assert held[0][0] == another
    for job in jobs:
        assert job.status().state == "running" and job.cancel()
        job.forget()

    def moved() -> bool:
        held.append(kept_where_it_was(on_c))
        return held[-1][0] != another

    wait_for(moved, 120)
    (was, kept), (now, _) = held[-2:]
    with on_c.trace(PROMPT):
        same = (on_c.model.layers[1].output[0] - kept).abs().max().save()
    assert same < 1e-4, "what was saved at the one that goes is there, and is used at the other one"
    assert (was, now) == (another, first) and place_of(on_a) == check_edit(on_c) == first
    slow.let_go(expected)
    wait_for(lambda: len(each(a)) == 1, 60)
    on_a.clear_edits()


def client_elsewhere(clients: Callable[[], interpose.Client], first: int) -> tuple[interpose.Client, int]:
    """A client whose session goes to another replica; a new one is ready a moment before Serve sends anything there."""
    for _ in range(30):
        client = clients()
        place = place_of(client.model("tiny"))
        if place != first:
            return client, place
        client.close()
        time.sleep(1)
    raise AssertionError("all sessions go to one replica")


def check_edit(model: interpose.Model) -> int:
    """The standing edit is there; returns the process that it ran in."""
    with model.trace(PROMPT):
        plain = model.model.layers[1].mlp.output.save()
    with model.trace(PROMPT, edits=["double"]):
        doubled = model.model.layers[1].mlp.output.save()
        pid = [os.getpid()].save()
    assert (doubled - 2 * plain).abs().max() < 1e-4
    return int(pid[0])


def test_a_model_comes_and_goes_while_others_run(
    second: RunningService,
    clients: Callable[[], interpose.Client],
    checkpoints: dict[str, Path],
    more: Joining,
    tmp_path: Path,
) -> None:
    wait_for(lambda: len(second.processes(ENGINES)) == 1, 60)  # the one that was removed is gone
    client = clients()
    expected = last_logits(client.model("tiny"))
    slow = Slow(clients().model("tiny"), tmp_path / "slow")
    more.read_until("runs")
    untouched = second.processes(INGRESS)

    other = client.model("gpt2")  # by a client that was there before
    assert [one.name for one in client.status().models] == ["tiny", "gpt2"]
    served = Served(client, "gpt2", checkpoints["gpt2"], Oracle(checkpoints["gpt2"]))
    check_everything(served, PROMPTS[0], *read_everything(served, PROMPTS[0]))
    expected_of_other = last_logits(other)
    drained = Slow(clients().model("gpt2"), tmp_path / "drained")

    more.go_on()
    more.read_until("is on its way out")
    refusals: list[interpose.InterposeError] = []

    def refused() -> bool:
        try:
            with other.trace(PROMPT):
                pass
        except interpose.InterposeError as error:
            refusals.append(error)
        return bool(refusals)

    wait_for(refused, 60)
    assert isinstance(refusals[0], Unavailable) and refusals[0].retry_after > 0
    drained.let_go(expected_of_other)  # it was not dropped
    slow.let_go(expected)

    def gone() -> bool:
        with contextlib.suppress(Unavailable):
            try:
                client.model("gpt2")
            except interpose.NotFound:
                return True
        return False

    wait_for(gone, 60)
    assert [one.name for one in client.status().models] == ["tiny"]
    with pytest.raises(interpose.NotFound, match="served here: tiny"), other.trace(PROMPT):
        pass
    assert second.processes(INGRESS) == untouched
