"""A connection that breaks in the middle of a trace: its events go on where they were, and it is not sent again."""

from __future__ import annotations

import time

import pytest

import interpose
from interpose.contract.errors import ConnectionLost, ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb


def five_prints(service, trace):
    for number in range(5):
        yield pb.Event(log=pb.Log(text=f"{number}\n"))
    yield service.saves(0, x=7)


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr("interpose.rpc.reconnect.BACKOFF_SECONDS", (0.01, 0.01, 0.01, 0.01))


def test_events_come_once_and_the_trace_is_sent_once(service, model, capsys):
    service.script = five_prints
    service.submit_breaks = [3]  # after the trace was accepted and two prints
    service.attach_breaks = [3, 5, 6]  # the first of them at once
    with model.trace("x"):
        x = 0
    assert x == 7 and capsys.readouterr().out == "0\n1\n2\n3\n4\n"
    assert len(service.traces) == 1 and service.seen == [3, 3, 5, 6] and not service.cancelled


def test_a_stream_goes_on(service, model):
    service.script = lambda service, trace: iter(
        [pb.Event(output=pb.Output(text="a", token_ids=[i], finished=i == 3)) for i in range(4)]
    )
    service.submit_breaks = [2]
    with model.trace("x", stream=True) as tracer:
        pass
    assert [out.new_token_ids for out in tracer.stream()] == [[0], [1], [2], [3]]
    assert len(service.traces) == 1


async def test_on_an_event_loop(service):
    service.script = five_prints
    service.submit_breaks = [4]
    async with await interpose.connect_async(service.address, progress=False) as client:
        model = await client.model()
        async with model.trace("x"):
            x = 0
    assert x == 7 and len(service.traces) == 1 and service.seen == [4]


def test_a_connection_that_does_not_come_back(service, model):
    service.script = five_prints
    service.submit_breaks = [2]
    service.attach_breaks = [2] * 10
    with pytest.raises(ConnectionLost, match="gone for a moment") as caught:
        with model.trace("x") as tracer:
            x = 0
    assert isinstance(caught.value, interpose.Unavailable) and caught.value.trace_id == tracer.id
    assert len(service.traces) == 1 and service.seen == [2] * 4


@pytest.mark.parametrize("code", [pb.ERROR_CODE_NOT_FOUND, pb.ERROR_CODE_CANCELLED])
def test_a_trace_that_is_gone_when_its_client_comes_back_can_be_run_again(service, model, code):
    service.script = five_prints
    service.submit_breaks = [2]
    service.refusals["Attach"] = [ServiceFailure(failure(code, "the trace was given up"))]
    with pytest.raises(ConnectionLost):
        with model.trace("x"):
            x = 0


def test_a_trace_that_failed_meanwhile_says_why(service, model):
    def script(service, trace):
        yield pb.Event(log=pb.Log(text="0\n"))
        raise ServiceFailure(failure(pb.ERROR_CODE_UNAVAILABLE, "the engine is gone", retry_after=5.0))

    service.script = script
    service.submit_breaks = [1]
    with pytest.raises(interpose.Unavailable, match="the engine is gone") as caught:
        with model.trace("x"):
            x = 0
    assert not isinstance(caught.value, ConnectionLost) and caught.value.retry_after == 5.0


def test_whoever_leaves_while_it_is_broken_does_not_wait(service, model, monkeypatch):
    monkeypatch.setattr("interpose.rpc.reconnect.BACKOFF_SECONDS", (60.0,))
    service.script = five_prints
    service.submit_breaks = [1]
    with model.trace("x", stream=True) as tracer:
        pass
    stream = tracer.stream()
    begun = time.monotonic()
    stream.close()
    assert time.monotonic() - begun < 30 and service.cancelled == [tracer.id]
