"""Jobs go on without their client and wait for a client that comes with their id; values left on the server are used there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import interpose
from interpose.rpc import session as session_module
from interpose.rpc.call import Running
from interpose.v1 import service_pb2
from tests.e2e.service import RunningService, wait_for
from tests.e2e.test_recovery import quiet

PROMPT = "The Eiffel Tower is in the middle of"


def script_of(service: RunningService, body: str, folder: Path) -> Path:
    """A client process that prints what it must tell and then waits to be killed."""
    path = folder / "client.py"
    head = f"import time, interpose\nclient = interpose.connect({service.address!r})\nmodel = client.model('llama')\n"
    path.write_text(head + textwrap.dedent(body) + "time.sleep(600)\n")
    return path


def told_and_killed(path: Path) -> str:
    """Start a client, read its first line, kill it."""
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        line = client.stdout.readline().strip()
        client.kill()
    assert line
    return line


def test_a_job_outlives_the_client_that_is_killed(
    service: RunningService, client: interpose.Client, tmp_path: Path
) -> None:
    body = f"""
        import torch
        with model.trace({PROMPT!r}, max_tokens=120, ignore_eos=True, temperature=0.0, blocking=False) as tracer:
            rows = [].save()
            for _step in tracer.iter[:]:
                rows.append(model.model.layers[1].output[0][-1].clone())
            large = torch.stack(rows).save()
        print(tracer.job.id, flush=True)
        """
    job = client.job(told_and_killed(script_of(service, body, tmp_path)))
    status = job.status()
    assert status.state in ("queued", "running") and status.model == "llama" and status.invokes == 1
    result = job.result(timeout=120)
    large = result["large"]
    assert len(result["rows"]) == len(result.result.token_ids) == result.usage.generated_tokens == 120
    assert torch.equal(torch.stack(result["rows"]), large) and large.shape == (120, 128)
    done = job.status()
    assert done.state == "done" and done.generated_tokens == 120 and done.seconds_left > 300

    model = client.model("llama")
    with model.trace(PROMPT, max_tokens=120, ignore_eos=True, temperature=0.0) as tracer:
        seen = [].save()
        for _step in tracer.iter[:]:
            seen.append(model.model.layers[1].output[0][-1].clone())
    assert (torch.stack(seen) - large).abs().max() < 1e-4 and tracer.result.text == result.result.text
    again = client.job(job.id).result(fetch=False)["large"]
    assert isinstance(again, interpose.RemoteValue) and torch.equal(again[7:9].fetch(), large[7:9])
    job.forget()
    with pytest.raises(interpose.NotFound):
        again.fetch()
    client.session(again.session_id).close()  # nobody else will


def test_a_job_is_waited_for_or_cancelled(service: RunningService, model: interpose.Model) -> None:
    with model.trace(PROMPT, blocking=False, temperature=0.0) as tracer:
        hidden = model.model.layers[1].output[0].save()
    tracer.job.wait(timeout=60)
    assert hidden.shape[-1] == 128 and tracer.result.token_ids
    with model.trace(PROMPT, blocking=False, max_tokens=500, ignore_eos=True) as endless:
        for _step in endless.iter[:]:
            time.sleep(0.2)  # by itself it would end long after it must be gone
    wait_for(lambda: endless.job.status().generated_tokens > 2, 60)
    with pytest.raises(interpose.DeadlineExceeded):
        endless.job.wait(timeout=0.5)
    assert endless.job.cancel()
    assert endless.job.status().state == "cancelled"
    with pytest.raises(interpose.Cancelled):
        endless.job.result()
    wait_for(lambda: quiet(service), 10)
    with model.trace(PROMPT, blocking=False) as failing:
        1 / 0
    with pytest.raises(interpose.InterventionError, match="ZeroDivisionError") as caught:
        failing.job.wait(timeout=60)
    assert caught.value.frames[0].text.strip().startswith("1 / 0")
    assert failing.job.status().state == "failed"
    for job in (tracer.job, endless.job, failing.job):
        job.forget()


def test_values_that_stay_on_the_server(service: RunningService, model: interpose.Model) -> None:
    """Only what is indexed moves; a later trace uses the value where it is, on both tensor-parallel ranks."""
    with model.trace(PROMPT, fetch=False, temperature=0.0):
        clean = model.model.layers[1].output[0].save()
        small = clean.mean().save()
        number = 3
        number = interpose.save(number)
    assert isinstance(clean, interpose.RemoteValue) and isinstance(small, interpose.RemoteValue) and number == 3
    assert small.shape == () and small.fetch().ndim == 0
    tokens = clean.shape[0]
    assert clean.nbytes == tokens * 128 * 4 and clean.dtype == torch.float32

    request = service_pb2.FetchRequest(session_id=clean.session_id, blob_id=clean._blob_id, view=clean[-1, :7]._view)
    assert sum(len(chunk.data) for chunk in service.stub.Fetch(request, timeout=60)) == 28
    whole = clean.fetch()
    assert torch.equal(clean[-1, :7].fetch(), whole[-1, :7])
    assert torch.equal(clean[[0, -1], None, 3:5].fetch(), whole[[0, -1]][:, None, 3:5])
    with model.trace(PROMPT, temperature=0.0):
        expected = model.model.layers[1].output[0].save()
    assert (whole - expected).abs().max() < 1e-4

    other = "A completely different sentence stands"
    with model.trace(other, temperature=0.0):
        model.model.layers[1].output[0][-1] = clean[-1] + clean[None, -1].sum(0)
        model.model.layers[2].output[0][:2] = clean[:2]
        by_reference = model.logits.output.save()
    last, first = whole[-1], whole[:2]
    with model.trace(other, temperature=0.0):
        model.model.layers[1].output[0][-1] = last * 2
        model.model.layers[2].output[0][:2] = first
        by_value = model.logits.output.save()
    with model.trace(other, temperature=0.0):
        untouched = model.logits.output.save()
    assert (by_reference - by_value).abs().max() < 1e-4 < (by_value - untouched).abs().max()


def test_a_value_that_is_gone(service: RunningService, client: interpose.Client) -> None:
    model = client.model("llama")
    with model.trace(PROMPT, blocking=False, fetch=False) as tracer:
        hidden = model.model.layers[1].output[0].save()
    tracer.job.wait(timeout=60)
    tracer.job.forget()
    with pytest.raises(interpose.NotFound, match="not on the server any more"):
        hidden.fetch()
    with pytest.raises(interpose.NotFound, match="kept for 600 s"):
        with model.trace(PROMPT):
            model.model.layers[1].output[0][-1] = hidden[-1]
    assert model.session.id == hidden.session_id, "the session itself is still there"


def test_what_the_traces_of_a_session_share_never_leaves_the_server(
    service: RunningService, client: interpose.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks: each trace sees what the one before left, also one that nobody has waited for or that failed."""
    moved: list[int] = []
    event, submit, upload = Running._event, session_module.SubmitRequest, session_module.upload
    monkeypatch.setattr(
        Running, "_event", lambda self, one: (moved.append(one.ByteSize() if one else 0), event(self, one))[1]
    )
    monkeypatch.setattr(
        session_module,
        "SubmitRequest",
        lambda **fields: (moved.append(fields["trace"].ByteSize()), submit(**fields))[1],
    )
    monkeypatch.setattr(
        session_module,
        "upload",
        lambda *args: (moved.append(sum(len(data) for data in args[2].values())), upload(*args))[1],
    )
    model = client.model("llama")
    with client.session() as s:
        with model.trace(temperature=0.0) as tracer:
            rows, total = [].save(), torch.zeros(300, 128).save()
            with tracer.invoke(PROMPT):
                total[0] = 1
                rows.append(model.model.layers[1].output[0][-1].repeat(300, 1))
        assert isinstance(rows[0], interpose.RemoteValue) and isinstance(total, interpose.RemoteValue)
        stored = s.session.describe().stored_bytes
        brought = sum(moved)
        with model.trace(PROMPT, temperature=0.0, blocking=False) as job:
            total[1] = rows[0][1] * 2
        with model.trace(PROMPT, temperature=0.0):
            assert total[0].eq(1).all() and total[1].eq(rows[0][1] * 2).all()
            total[2] = 3
            rows.append(len(rows))
        with pytest.raises(interpose.InterventionError, match="ZeroDivisionError"):
            with model.trace(PROMPT):
                rows.append("never")
                total[3] = 4
                1 / 0
        with model.trace(PROMPT):
            total[4] = 5
            rows.append("last")
        assert rows[1:] == [1, "last"]
        job.job.wait()
        assert rows[1:] == [1, "last"] and sum(moved) - brought < 60_000, "five traces, and no tensor of 150 kB"
        added = s.session.describe().stored_bytes - stored
        assert added < 4 * 300 * 128 * 4, (
            "three tensors that changed; what did not, and what a failed trace made, is not kept"
        )
        job.job.forget()
    assert total[:5, 0].tolist()[2:] == [3, 0, 5] and torch.equal(total[1], rows[0][0] * 2)
    assert total[5:].abs().sum() == 0 and rows[0].shape == (300, 128)
    with model.trace(PROMPT, temperature=0.0):
        expected = model.model.layers[1].output[0][-1].save()
    assert (rows[0][7] - expected).abs().max() < 1e-4


def test_a_value_is_used_in_other_sessions_of_the_tenant(service: RunningService, client: interpose.Client) -> None:
    model = client.model("llama")
    with model.trace(PROMPT, temperature=0.0, fetch=False):
        clean = model.model.layers[1].output[0].save()
    with interpose.connect(service.address, progress=False) as other:
        with other.session():
            with other.model("llama").trace("A completely different sentence", temperature=0.0):
                model.model.layers[1].output[0][-1] = clean[-1]
                patched = model.model.layers[1].output[0][-1].save()
                again = clean.save()
        assert torch.equal(patched, clean[-1].fetch()) and torch.equal(again, clean.fetch())
        gone = service.open_session()
        clean._session_id, known = gone, clean._session_id
        service.close_session(gone)
        with pytest.raises(interpose.NotFound, match=r"another session.*x\.fetch\(\)"):
            with other.model("llama").trace(PROMPT):
                print(clean.sum())
        clean._session_id = known


def test_a_session_outlives_the_client_that_is_killed(
    service: RunningService, client: interpose.Client, tmp_path: Path
) -> None:
    body = f"""
        with client.session() as s:
            with model.trace({PROMPT!r}, temperature=0.0):
                wide = model.model.layers[1].output[0].repeat(20, 1).save()
                rows = [wide[:1].clone()]
                rows.save()
            with model.trace({PROMPT!r}, temperature=0.0):
                model.model.layers[1].output[0][-1] = wide[-1] * 2
                double = model.model.layers[1].output[0].repeat(20, 1).save()
            print(s.id, flush=True)
            time.sleep(600)
        """
    session_id = told_and_killed(script_of(service, body, tmp_path))
    model = client.model("llama")
    with client.session(session_id) as s:
        saved = s.saved()
        assert set(saved) == {"wide", "rows", "double"}
        wide, double = saved["wide"], saved["double"]
        assert isinstance(wide, interpose.RemoteValue) and wide.nbytes > 16 << 10
        assert torch.equal(double[-1].fetch(), wide[-1].fetch() * 2)
        assert [job.status().state for job in s.traces()] == ["done", "done"]
        with model.trace(PROMPT, temperature=0.0):
            model.model.layers[1].output[0][-1] = wide[-1] * 2
            third = model.model.layers[1].output[0].repeat(20, 1).save()
            small = third[0, :5].clone().save()
        assert isinstance(third, interpose.RemoteValue) and isinstance(small, torch.Tensor)
        expected = double.fetch()
    assert isinstance(third, torch.Tensor) and torch.equal(third, expected)
    with pytest.raises(interpose.NotFound, match="no such session"):
        client.session(session_id).saved()
