"""A second service on the same machine, from its start to its end: tenants, and nothing left when it is told to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import interpose
from interpose.errors import Unauthenticated, Unavailable
from interpose.v1 import value_pb2
from tests.e2e.service import RunningService, wait_for
from tests.e2e.test_fidelity import PROMPTS, Served, check_everything, read_everything
from tests.oracle import Oracle

RETENTION_SECONDS = 12.0
TENANTS = [{"name": "red", "api_key": "red-key-1"}, {"name": "blue", "api_key": "blue-key-1"}]

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def second(
    service: RunningService, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    """A service of its own, beside the shared one: one worker, two tenants, given on the command line and in a file."""
    folder = tmp_path_factory.mktemp("second")
    sessions = {"warm": 1, "retention_seconds": RETENTION_SECONDS, "stored_bytes": 8 << 20, "max_per_tenant": 3}
    settings: dict[str, object] = {"tenants": TENANTS, "sessions": sessions}
    model = [str(checkpoints["llama"]), "--name", "tiny", "--dtype", "float32", "--enforce-eager"]
    running = RunningService(folder, settings, *model, "--max-model-len", "64").wait()
    yield running
    running.stop()


def test_tenants(second: RunningService) -> None:
    with pytest.raises(Unauthenticated):
        interpose.connect(second.address)
    with pytest.raises(Unauthenticated):
        interpose.connect(second.address, api_key="red-key-2")
    with (
        interpose.connect(second.address, api_key="red-key-1") as red,
        interpose.connect(second.address, api_key="blue-key-1") as blue,
    ):
        model = red.model()
        assert model.name == "tiny"
        assert model.max_model_len == 64
        with model.trace("one two three"):
            hidden = model.model.layers[0].output[0].save()
        assert hidden.shape[-1] == 128
        assert [tenant.name for tenant in red.status().tenants] == ["red"]
        assert not blue.status().tenants
        # What is red's is not there for blue.
        red_session = red.own_session.open()
        with pytest.raises(interpose.NotFound, match="no such session"):
            blue.own_session.fetch(red_session, [value_pb2.Blob(id="x", size=1)])
        with model.trace("one two three", blocking=False) as tracer:
            hidden = model.model.layers[0].output[0].save()
        for call in (interpose.Job.status, interpose.Job.result, interpose.Job.cancel, interpose.Job.forget):
            with pytest.raises(interpose.NotFound, match="no such session"):
                call(blue.job(tracer.job.id))
        assert red.job(tracer.job.id).result()["hidden"].shape[-1] == 128
        tracer.job.forget()


def test_what_is_kept_is_bounded_in_time_and_size(second: RunningService) -> None:
    with interpose.connect(second.address, api_key="red-key-1", progress=False) as red:
        model = red.model()
        with model.trace("one two three", blocking=False) as tracer:
            large = model.model.layers[0].output[0].new_ones(1_400_000).save()
        tracer.job.wait(timeout=60)
        assert 0 < tracer.job.status().seconds_left <= RETENTION_SECONDS
        with red.session() as s:
            with model.trace("one two three"):
                first = model.model.layers[0].output[0].new_ones(1_400_000).save()
            with pytest.raises(interpose.QuotaExceeded, match="no room for 5600000 more: save less, or close it"):
                with model.trace("one two three"):
                    second_one = model.model.layers[0].output[0].new_ones(1_400_000).save()
            assert set(s.saved()) == {"first"}
        assert first.sum() == 1_400_000

        def gone() -> bool:
            try:
                tracer.job.status()
            except interpose.NotFound as error:
                return "kept for 12 s after the trace has ended" in error.message
            return False

        wait_for(gone, 60)
        with pytest.raises(interpose.NotFound, match="kept for 12 s"):
            red.job(tracer.job.id).result()


def test_kept_sessions_do_not_give_way(second: RunningService) -> None:
    with interpose.connect(second.address, api_key="blue-key-1", progress=False) as blue:
        kept = [blue.session() for _ in range(3)]
        assert len({session.id for session in kept}) == 3
        with pytest.raises(
            interpose.QuotaExceeded, match="blue has 3 sessions open, the most a tenant may have"
        ) as caught:
            assert blue.session().id
        assert caught.value.retry_after > 0
        kept[0].close()
        assert blue.session(kept[1].id).saved() == {}
        with blue.session() as another:
            assert another.id
        for session in kept:
            session.close()


def test_one_worker_reads_what_transformers_computes(second: RunningService, checkpoints: dict[str, Path]) -> None:
    with interpose.connect(second.address, api_key="blue-key-1", progress=False) as client:
        served = Served(client, "tiny", checkpoints["llama"], Oracle(checkpoints["llama"]))
        for prompt in PROMPTS:
            check_everything(served, prompt, *read_everything(served, prompt))


def test_a_server_that_stops_in_the_middle(second: RunningService) -> None:
    errors: list[Exception] = []
    started = threading.Event()

    def run() -> None:
        client = interpose.connect(second.address, api_key="red-key-1", progress=False)
        model = client.model()
        started.set()
        try:
            with model.trace("one two three", max_tokens=60, ignore_eos=True) as tracer:
                for _step in tracer.iter[:]:
                    import time

                    time.sleep(0.5)
        except interpose.InterposeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    time.sleep(2)
    begun = time.monotonic()
    assert second.stop(signal.SIGINT) == 0
    assert time.monotonic() - begun < 40
    thread.join(30)
    assert len(errors) == 1
    assert isinstance(errors[0], Unavailable)
    with pytest.raises(Unavailable):
        interpose.connect(second.address, api_key="red-key-1", timeout=3)
