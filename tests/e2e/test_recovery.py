"""Parts of the service die; their traces fail with an error that says so, and the service comes back by itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import grpc
import pytest

import interpose
from interpose.errors import NotFound, ServiceFailure, Unavailable
from interpose.v1 import trace_pb2 as pb
from tests.e2e.service import RunningService, wait_for
from tests.e2e.test_calls import trace

ENDLESS = "for step in tracer.iter[:]:\n    pass\n"


def endless() -> pb.Trace:
    """A trace that takes long."""
    long = trace(ENDLESS, (), max_tokens=500)
    long.invokes[0].sampling.add(name="ignore_eos").value.boolean = True
    return long


class Background(threading.Thread):
    """Runs a trace; keeps how it ended."""

    def __init__(self, service: RunningService, session: str) -> None:
        super().__init__(daemon=True)
        self._service = service
        self._session = session
        self.failure: pb.Failure | None = None
        self.start()
        wait_for(lambda: any(model.running for model in service.status().models), 20)

    def run(self) -> None:
        try:
            self._service.submit(endless(), self._session)
        except ServiceFailure as error:
            self.failure = error.failure


def quiet(service: RunningService) -> bool:
    """Whether no engine works on anything."""
    return not any(model.running or model.waiting for model in service.status().models)


def test_a_client_that_is_killed_takes_its_requests_with_it(service: RunningService, tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import interpose
        model = interpose.connect({service.address!r}).model("llama")
        with model.trace("one two three", max_tokens=500, ignore_eos=True) as tracer:
            for step in tracer.iter[:]:
                print("step")
        """
    )
    path = tmp_path / "client.py"
    path.write_text(script)
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "step\n"
        wait_for(lambda: not quiet(service), 10)
        client.kill()
    wait_for(lambda: quiet(service), 20)  # its client may come back for five seconds


def test_a_session_that_is_killed(service: RunningService, client: interpose.Client) -> None:
    model = client.model("llama")
    session = service.open_session()
    running = Background(service, session)
    for process in service.processes("ray::Session"):
        process.kill()
    running.join(20)
    assert running.failure is not None
    assert running.failure.code == pb.ERROR_CODE_UNAVAILABLE
    with pytest.raises(ServiceFailure) as caught:
        service.submit(trace(), session)
    assert caught.value.failure.code == pb.ERROR_CODE_NOT_FOUND
    # The library opens another one by itself.
    with model.trace("one two three"):
        hidden = model.model.layers[0].output[0].save()
    assert hidden.shape[-1] == 128
    wait_for(lambda: quiet(service), 10)


@pytest.mark.timeout(400)
def test_an_engine_that_is_killed(service: RunningService, client: interpose.Client) -> None:
    model = client.model("llama")
    session = service.open_session()
    events = service.submit(trace("hidden = model.model.layers[0].output[0].new_ones(99999).save()\n"), session)
    [saves] = [event.saves for event in events if event.WhichOneof("kind") == "saves"]
    blob = next(value.tensor.blob.id for value in saves.objects.values if value.tensor.blob.id)
    with model.trace("one two three", blocking=False) as job_tracer:
        kept = model.model.layers[0].output[0].new_ones(99999).save()
    job_tracer.job.wait(timeout=60)
    replica = next(one for one in service.processes("engine-llama"))
    [core] = [one for one in replica.children(recursive=True) if "EngineCore" in one.name()]

    running = Background(service, session)
    begun = time.monotonic()
    core.kill()
    running.join(30)
    assert running.failure is not None
    assert running.failure.code == pb.ERROR_CODE_UNAVAILABLE
    assert time.monotonic() - begun < 20

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
    assert hidden.shape[-1] == 128
    assert len(service.fetch(session, blob)) == 99999 * 4
    assert client.job(job_tracer.job.id).result()["kept"].sum() == 99999
    job_tracer.job.forget()
    service.close_session(session)


def test_nothing_is_left_of_any_of_it(service: RunningService) -> None:
    wait_for(lambda: quiet(service), 10)  # engines report every second
    assert {model.state for model in service.status().models} == {"RUNNING"}
    assert issubclass(NotFound, interpose.InterposeError)
