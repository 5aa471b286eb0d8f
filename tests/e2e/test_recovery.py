"""Parts of the service die; their traces fail with an error that says so, and the service comes back by itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

import interpose
from benchmarks.processes import ENGINE, title
from interpose.contract.errors import ServiceFailure, Unavailable, from_failure
from interpose.v1 import trace_pb2 as pb
from tests.cluster.matrix import FAULTS, Seen, There, leaks, report, shown
from tests.e2e.service import RunningService, wait_for
from tests.e2e.test_calls import trace

ENDLESS = "for step in tracer.iter[:]:\n    pass\n"
LARGE = "hidden = model.model.layers[0].output[0].new_ones(99999).save()\n"


def endless(model: str) -> pb.Trace:
    """A trace that takes long."""
    long = trace(ENDLESS, (), max_tokens=500)
    long.model = model
    long.invokes[0].sampling.add(name="ignore_eos").value.boolean = True
    return long


class Background(threading.Thread):
    """Runs a trace; keeps how it ended."""

    def __init__(self, service: RunningService, session: str, model: str = "llama") -> None:
        super().__init__(daemon=True)
        self._model = model
        self._service = service
        self._session = session
        self.failure: pb.Failure | None = None
        self.start()
        wait_for(lambda: any(model.running for model in service.status().models), 20)

    def run(self) -> None:
        try:
            self._service.submit(endless(self._model), self._session)
        except ServiceFailure as error:
            self.failure = error.failure


def answers(call: Callable[[], object]) -> bool:
    """Whether a call gives something else than that it should be tried again."""
    try:
        call()
    except Unavailable:
        return False
    except ServiceFailure as error:
        if error.failure.code != pb.ERROR_CODE_UNAVAILABLE:
            raise
        return False
    return True


def quiet(service: RunningService) -> bool:
    """Whether no engine works on anything."""
    return not any(model.running or model.waiting for model in service.status().models)


def test_a_client_that_is_killed_takes_its_requests_with_it(service: RunningService, tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import interpose, time
        model = interpose.connect({service.address!r}).model("llama")
        with model.trace("one two three", max_tokens=500, ignore_eos=True) as tracer:
            for step in tracer.iter[:]:
                print("step")
                time.sleep(0.2)  # by itself it would end long after it must be gone
        """
    )
    path = tmp_path / "client.py"
    path.write_text(script)
    before = There.of(service)
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "step\n"
        wait_for(lambda: not quiet(service), 10)
        client.kill()
    wait_for(lambda: quiet(service), 20)  # its client may come back for five seconds
    report(Seen(FAULTS[0], "nothing any more", None, None, 0, leaks(service, before)))


def test_sessions_that_are_killed(service: RunningService, client: interpose.Client) -> None:
    """All of them: each goes on under its own id, and what had ended is there."""
    model = client.model("llama")
    session = service.open_session()
    [saves] = [event.saves for event in service.submit(trace(LARGE), session) if event.WhichOneof("kind") == "saves"]
    blob = next(value.tensor.blob.id for value in saves.objects.values if value.tensor.blob.id)
    with model.trace("one two three", blocking=False) as job_tracer:
        kept = model.model.layers[0].output[0].new_ones(99999).save()
    job_tracer.job.wait(timeout=60)
    with model.trace("one two three", fetch=False):
        remote = model.model.layers[0].output[0].new_ones(99999).save()
    with client.session() as s:
        with model.trace() as tracer:
            shared = [].save()
            with tracer.invoke("one two three"):
                shared.append(model.model.layers[0].output[0].new_ones(99999))
        opened = s.id
        before = There.of(service)
        running = Background(service, session)
        begun = time.monotonic()
        for process in service.processes("ray::Session"):
            process.kill()
        running.join(20)
        saw = time.monotonic() - begun
        assert running.failure is not None
        assert running.failure.code == pb.ERROR_CODE_UNAVAILABLE and running.failure.retry_after > 0
        wait_for(lambda: answers(lambda: service.submit(trace(), session)), 30)
        back = time.monotonic() - begun
        wait_for(lambda: answers(client.job(job_tracer.job.id).status), 30)
        wait_for(lambda: answers(s.saved), 30)
        wait_for(lambda: answers(lambda: remote[:1].fetch()), 30)
        lost = int(len(service.fetch(session, blob)) != 99999 * 4)
        lost += int(client.job(job_tracer.job.id).result()["kept"].sum() != 99999)
        lost += int(remote.fetch().sum() != 99999)
        with model.trace("one two three"):
            shared.append(shared[0].sum())
        assert s.id == opened
    lost += int(shared[1] != 99999)
    job_tracer.job.forget()
    service.close_session(session)
    wait_for(lambda: quiet(service), 10)
    report(Seen(FAULTS[3], shown(from_failure(running.failure)), saw, back, lost, leaks(service, before)))


@pytest.mark.timeout(700)
def test_an_engine_that_is_killed(service: RunningService, client: interpose.Client) -> None:
    model = client.model("llama")
    session = service.open_session()
    events = service.submit(trace(LARGE), session)
    [saves] = [event.saves for event in events if event.WhichOneof("kind") == "saves"]
    blob = next(value.tensor.blob.id for value in saves.objects.values if value.tensor.blob.id)
    with model.trace("one two three", blocking=False) as job_tracer:
        kept = model.model.layers[0].output[0].new_ones(99999).save()
    job_tracer.job.wait(timeout=60)
    replica = next(one for one in service.processes("engine-llama"))
    [core] = [one for one in replica.children(recursive=True) if ENGINE in title(one)]

    before = There.of(service)
    running = Background(service, session)
    killed = time.monotonic()
    core.kill()
    running.join(30)
    assert running.failure is not None
    assert running.failure.code == pb.ERROR_CODE_UNAVAILABLE
    saw = time.monotonic() - killed
    assert saw < 20

    # While it is away: an answer at once, what was finished stays, and the other model does not notice.
    wait_for(lambda: service.state("llama") != "RUNNING", 20)
    begun = time.monotonic()
    with pytest.raises(ServiceFailure) as caught:
        service.submit(trace(), session)
    assert caught.value.failure.code == pb.ERROR_CODE_UNAVAILABLE
    assert caught.value.failure.retry_after > 0
    assert time.monotonic() - begun < 5
    assert len(service.fetch(session, blob)) == 99999 * 4
    assert client.job(job_tracer.job.id).result()["kept"].sum() == 99999
    other = client.model("gpt2")
    with other.trace("one two three"):
        logits = other.logits.output.save()
    assert logits.shape[0] == 1
    with pytest.raises(Unavailable) as lost:
        with model.trace("one two three"):
            hidden = model.model.layers[0].output[0].save()
    assert lost.value.status == grpc.StatusCode.UNAVAILABLE

    service.wait_until_running("llama")
    with model.trace("one two three"):
        hidden = model.model.layers[0].output[0].save()
    back = time.monotonic() - killed
    assert hidden.shape[-1] == 128
    assert len(service.fetch(session, blob)) == 99999 * 4
    assert client.job(job_tracer.job.id).result()["kept"].sum() == 99999
    job_tracer.job.forget()
    service.close_session(session)
    report(Seen(FAULTS[5], shown(from_failure(running.failure)), saw, back, 0, leaks(service, before)))


@pytest.mark.timeout(700)
def test_a_block_that_nothing_interrupts(service: RunningService, client: interpose.Client) -> None:
    """Its worker is ended long before vLLM would give it up: its trace is told why, its neighbour's may be tried again."""
    session, other = service.open_session(), service.open_session()
    model = client.model("gpt2")
    before = There.of(service)
    running = Background(service, other, "gpt2")
    hostile = trace("sum(range(10**12))\n", ())
    hostile.model = "gpt2"
    begun = time.monotonic()
    [failed] = [event.failed for event in service.submit(hostile, session) if event.WhichOneof("kind") == "failed"]
    assert failed.code == pb.ERROR_CODE_DEADLINE_EXCEEDED, failed
    assert "in code that nothing can interrupt" in failed.message
    running.join(30)
    saw = time.monotonic() - begun
    assert running.failure is not None
    assert running.failure.code == pb.ERROR_CODE_UNAVAILABLE and running.failure.retry_after > 0
    assert saw < 60

    def run() -> None:
        with model.trace("one two three"):
            logits = model.logits.output.save()
        assert logits.shape[0] == 1

    wait_for(lambda: answers(run), 300)
    service.close_session(session)
    service.close_session(other)
    assert leaks(service, before) == 0


def test_the_directory_that_is_killed(service: RunningService, client: interpose.Client) -> None:
    """Its knowledge is gone; new traces run."""
    [directory] = service.processes("ray::Directory")
    model = client.model("llama")
    with model.trace("one two three"):
        hidden = model.model.layers[0].output[0].save()
    directory.kill()

    def run() -> None:
        with model.trace("one two three"):
            hidden = model.model.layers[0].output[0].save()
        assert hidden.shape[-1] == 128

    wait_for(lambda: not directory.is_running(), 10)
    wait_for(lambda: answers(run), 60)

    def no_other_sessions() -> bool:
        status = service.status()
        return len(service.processes("ray::Session")) == status.warm_sessions

    wait_for(no_other_sessions, 60)


def test_nothing_is_left_of_any_of_it(service: RunningService) -> None:
    wait_for(lambda: quiet(service), 10)  # engines report every second
    assert {model.state for model in service.status().models} == {"RUNNING"}
