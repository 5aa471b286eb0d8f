"""The client for asyncio: the same surface, awaited, and an event loop that goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings

import numpy as np
import pytest

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from tests.unit.interpose.conftest import finish, numbers
from tests.unit.interpose.results.test_streaming import Endless, three_rows


async def connected(service) -> interpose.AsyncClient:
    return await interpose.connect_async(service.address, progress=False)


async def test_the_same_surface(service):
    def script(service, trace):
        yield pb.Event(log=pb.Log(text="printed\n"))
        yield service.saves(0, hidden=numbers(2000))
        yield from finish(service, trace)

    service.script = script
    async with await connected(service) as client:
        assert client.models == ("tiny-llama",) and client.limits.max_invokes == 4 and "asyncio" in repr(client)
        model = await client.model()
        assert (await client.status()).server_version == "9.9"
        async with model.trace("Hello", max_tokens=3) as tracer:
            hidden = model.model.layers[1].output[0].save()
            raise ZeroDivisionError
        assert np.array_equal(np.asarray(hidden), numbers(2000))
        assert tracer.result.text == " x" and tracer.usage.prompt_tokens == 2
        with pytest.raises(interpose.NotFound):
            await client.model("other")
    assert not service.sessions, "leaving the client closes its session"


async def test_several_prompts(service):
    def script(service, trace):
        yield from finish(service, trace)
        yield service.saves(1, last=1)
        yield service.saves(-1, {0: [5, 6]})

    service.script = script
    async with await connected(service) as client:
        model = await client.model()
        async with model.trace() as tracer:
            found = [].save()
            for prompt in "ab":
                with tracer.invoke(prompt) as one:
                    found.append(1)
                    last = 0
        assert found == [5, 6] and last == 1 and one.result.text == " x" and len(service.traces[0].invokes) == 2


async def test_streaming(service):
    service.script = three_rows
    async with await connected(service) as client:
        model = await client.model()
        async with model.trace("Hello", stream=True) as tracer:
            rows = []
        assert [len(out.saves["rows"]) async for out in tracer.stream()] == [1, 2, 3]
        assert [len(row) for row in rows] == [3, 1000, 5]


async def test_many_traces_at_once_and_a_loop_that_goes_on(service):
    """More traces than any pool has threads wait at the same time, while the loop does other work."""
    together, waiting, beating = threading.Barrier(5), threading.Event(), threading.Event()

    def script(service, trace):
        together.wait(20)
        waiting.set()
        assert beating.wait(20), "the loop stands still while traces wait"
        yield service.saves(0, x=trace.invokes[0].prompt.text)
        yield from finish(service, trace)

    service.script = script
    async with await connected(service) as client:
        model = await client.model()

        async def heart():
            while not waiting.is_set():
                await asyncio.sleep(0.01)
            beating.set()

        async def one(prompt):
            async with model.trace(prompt):
                x = ""
            return x

        found = await asyncio.wait_for(asyncio.gather(heart(), *(one(prompt) for prompt in "abcde")), 60)
        assert found[1:] == list("abcde")


async def test_errors(service):
    service.refusals["Submit"] = [ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, "too many"))]
    async with await connected(service) as client:
        model = await client.model()
        with pytest.raises(interpose.QuotaExceeded, match="too many"):
            async with model.trace("Hello"):
                x = 1
        with pytest.raises(interpose.InvalidArgument, match="cannot await"):
            async with model.trace("Hello"):
                await asyncio.sleep(1)
        with pytest.raises(interpose.UnknownLocation):
            async with model.trace("Hello"):
                x = model.model.layerz[0].output.save()

        def script(service, trace):
            yield pb.Event(failed=pb.Failure(code=pb.ERROR_CODE_INTERVENTION, message="ValueError: boom"))

        service.script = script
        with pytest.raises(interpose.InterventionError, match="boom"):
            async with model.trace("Hello"):
                x = 1


async def test_cancelling_a_task_cancels_its_trace(service):
    service.script = script = Endless()
    async with await connected(service) as client:
        model = await client.model()

        async def run():
            async with model.trace("Hello", max_tokens=1000):
                x = 1

        task = asyncio.create_task(run())
        while not script.sent:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        deadline = time.monotonic() + 20
        while len(service.cancelled) != 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert service.cancelled == [service.traces[0].id]
        assert await asyncio.to_thread(script.left.wait, 20)


async def test_cancelling_before_the_trace_is_accepted(service):
    """The trace that is accepted after its task has gone is cancelled too."""
    go = threading.Event()
    original = service.Submit

    def late(request, context):
        go.wait(20)
        yield from original(request, context)

    service.Submit = late
    service.script = Endless()
    async with await connected(service) as client:
        model = await client.model()

        async def run():
            async with model.trace("Hello", max_tokens=1000):
                x = 1

        task = asyncio.create_task(run())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        deadline = time.monotonic() + 20
        while not service.cancelled and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert service.traces == [] or service.cancelled == [service.traces[0].id]


async def test_blocking_an_event_loop_is_warned_about_where_the_client_is_for_asyncio(service, client):
    async with await connected(service) as asynchronous:
        model = await asynchronous.model()
        with pytest.warns(interpose.InterposeWarning, match="async with") as caught:
            with model.trace("Hello"):
                x = 1
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with client.model().trace("Hello"):
            x = 1
        async with client.model().trace("Hello"):  # an ordinary client's model takes both
            x = 1
