"""A trace with `blocking=False` is begun and left; its job is asked, followed and found again, and delivers when waited for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2
from tests.unit.interpose.conftest import finish, numbers

notebook: dict[str, object] = {}


def saves_and_prints(service, trace):
    yield trace_pb2.Event(log=trace_pb2.Log(text="one\n"))
    yield from finish(service, trace)
    yield trace_pb2.Event(log=trace_pb2.Log(text="two\n"))
    yield service.saves(0, hidden=numbers(2000), word="x")


def test_the_block_ends_at_once_and_wait_assigns(service, model, capsys):
    service.script = saves_and_prints
    with model.trace("Hello", blocking=False) as tracer:
        hidden = model.model.layers[1].output[0].save()
        word = "a".save()
    assert "hidden" not in locals() and capsys.readouterr().out == ""
    with pytest.raises(interpose.InvalidArgument, match=r"tracer\.job\.wait\(\)"):
        _ = tracer.result
    assert tracer.job.id == f"s0/{tracer.id}" and tracer.job.status().state == "running"
    tracer.job.wait()
    assert np.array_equal(np.asarray(hidden), numbers(2000)) and word == "x"
    assert tracer.result.token_ids == [7] and tracer.usage.prompt_tokens == 2
    assert capsys.readouterr().out == "one\ntwo\n"
    hidden = None
    tracer.job.wait()
    assert hidden is None, "a second wait assigns nothing"


def begin(model):
    seen = [0]
    with model.trace("Hello", blocking=False) as tracer:
        seen.append(1)
        hidden = 1
    return tracer, seen, lambda: hidden


def test_a_function_that_has_returned_gets_no_names_but_its_containers_change(service, model):
    def script(service, trace):
        [index] = [i for i, value in enumerate(trace.scope.values) if value.WhichOneof("kind") == "list"]
        yield service.saves(0, hidden=3)
        yield service.saves(-1, {index: [0, 1]})

    service.script = script
    tracer, seen, read_hidden = begin(model)
    tracer.job.wait()
    assert seen == [0, 1]
    with pytest.raises(NameError):
        read_hidden()
    result = tracer.job.result()
    assert result["hidden"] == 3 and result["seen"] == [0, 1]


def test_the_names_of_a_notebook_are_assigned_when_its_cell_is_long_over(service, model):
    service.script = lambda service, trace: iter([service.saves(0, word="x")])
    source = "with model.trace('Hello', blocking=False) as tracer:\n    word = 'a'.save()\n"
    namespace = {"model": model, "__name__": "cell"}
    import linecache

    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(keepends=True), "<cell 1>")
    exec(compile(source, "<cell 1>", "exec"), namespace)
    assert "word" not in namespace
    namespace["tracer"].job.wait()
    assert namespace["word"] == "x"


def test_another_client_finds_the_job_by_its_id(service, model):
    service.script = saves_and_prints
    with model.trace("Hello", blocking=False) as tracer:
        hidden = 1
    job_id = tracer.job.id
    model._client.close()
    assert service.closed[0].keep_jobs
    with interpose.connect(service.address, progress=False) as other:
        result = other.job(job_id).result()
        assert np.array_equal(np.asarray(result["hidden"]), numbers(2000))
        assert result.result.text == " x" and set(result) == {"hidden", "word"} and len(result) == 2
        with pytest.raises(KeyError, match="it saved hidden, word"):
            result["hiden"]
        remote = other.job(job_id).result(fetch=False)["hidden"]
        assert isinstance(remote, interpose.RemoteValue) and tuple(remote.shape) == (2000,)
        with pytest.raises(interpose.NotFound):
            other.job("s0/other").result()
        for wrong in ("", "x", "/", 3, None):
            with pytest.raises(interpose.InvalidArgument, match=r"tracer\.job\.id"):
                other.job(wrong)


def test_a_broken_connection_is_taken_up_again_and_nothing_is_printed_twice(service, model, capsys):
    service.script = saves_and_prints
    service.attach_breaks = [1, 3, 4]
    with model.trace("Hello", blocking=False) as tracer:
        word = 1
    tracer.job.wait()
    assert word == "x" and tracer.result.token_ids == [7]
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_job_that_failed(service, model):
    def script(service, trace):
        yield service.saves(0, word="x")
        yield trace_pb2.Event(
            failed=trace_pb2.Failure(code=trace_pb2.ERROR_CODE_INTERVENTION, message="ValueError: boom")
        )

    service.script = script
    with model.trace("Hello", blocking=False) as tracer:
        word = 1
    with pytest.raises(interpose.InterventionError, match="boom"):
        tracer.job.wait()
    assert word == "x"
    with pytest.raises(interpose.InterventionError, match="boom"):
        tracer.job.result()


def test_a_job_whose_engine_died_is_not_asked_again_and_again(service, model):
    def script(service, trace):
        yield from ()
        raise ServiceFailure(failure(trace_pb2.ERROR_CODE_UNAVAILABLE, "the engine is gone", trace_id=trace.id))

    service.script = script
    with model.trace("Hello", blocking=False) as tracer:
        word = 1
    with pytest.raises(interpose.Unavailable, match="the engine is gone"):
        tracer.job.wait()


def test_waiting_with_a_timeout(service, model):
    service.script = saves_and_prints
    service.gate.clear()
    with model.trace("Hello", blocking=False) as tracer:
        word = 1
    with pytest.raises(interpose.DeadlineExceeded, match="has not ended yet"):
        tracer.job.wait(timeout=0.2)
    assert not service.cancelled, "the trace goes on"
    threading.Timer(0.1, service.gate.set).start()
    tracer.job.wait(timeout=30)
    assert word == "x"


def test_cancelling_and_forgetting(service, model):
    with model.trace("Hello", blocking=False) as tracer:
        pass
    assert tracer.job.cancel()
    assert service.cancelled == [tracer.id]
    assert tracer.job.result().result.text == " x"
    tracer.job.forget()
    with pytest.raises(interpose.NotFound):
        model._client.job(tracer.job.id).result()


def test_a_blocking_trace_is_no_job(service, model):
    with model.trace("Hello") as tracer:
        pass
    with pytest.raises(interpose.InvalidArgument, match="blocking=False"):
        _ = tracer.job
