"""Jobs, sessions and values on the server from an event loop: the same surface, awaited."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2
from tests.unit.interpose.aio.test_async import connected
from tests.unit.interpose.conftest import finish, numbers


def saves(**values):
    def script(service, trace):
        yield from finish(service, trace)
        yield service.saves(0, **values)

    return script


async def test_a_job(service):
    service.script = saves(hidden=numbers(2000))
    async with await connected(service) as client:
        model = await client.model()
        async with model.trace("a", blocking=False) as tracer:
            hidden = 0
        job = tracer.job
        assert isinstance(job, interpose.AsyncJob) and "asyncio job" in repr(job)
        assert (await job.status()).state == "running"
        await job.wait()
        assert np.array_equal(hidden, numbers(2000)) and tracer.result.text == " x"
        found = client.job(job.id)
        result = await found.result(fetch=False)
        assert np.array_equal(await result["hidden"][3:5].fetch(), [3, 4])
        assert await found.cancel()
        await found.forget()
        with pytest.raises(interpose.NotFound):
            await client.job(job.id).wait()
        with pytest.raises(interpose.InvalidArgument, match=r"tracer\.job\.id"):
            client.job("nonsense")


async def test_a_job_that_failed(service):
    def script(service, trace):
        raise ServiceFailure(failure(trace_pb2.ERROR_CODE_UNAVAILABLE, "the engine is gone", trace_id=trace.id))
        yield

    service.script = script
    async with await connected(service) as client:
        async with (await client.model()).trace("a", blocking=False) as tracer:
            pass
        with pytest.raises(interpose.Unavailable, match="engine is gone"):
            await tracer.job.result()


async def test_waiting_that_is_given_up_leaves_the_job(service):
    service.gate.clear()
    async with await connected(service) as client:
        async with (await client.model()).trace("a", blocking=False) as tracer:
            pass
        for _ in range(2):
            with pytest.raises(asyncio.TimeoutError):  # in Python 3.10 another class than TimeoutError
                await asyncio.wait_for(tracer.job.wait(), 0.3)
        with pytest.raises(interpose.DeadlineExceeded):
            await tracer.job.result(timeout=0.2)
        assert not service.cancelled
        service.gate.set()
        await tracer.job.wait(timeout=30)


async def test_a_session(service):
    service.script = saves(hidden=numbers(2000), pair=(numbers(900), 1))
    async with await connected(service) as client:
        model = await client.model()
        async with client.session() as s:
            assert s.id == "s0" and "asyncio session" in repr(s) and service.opened[-1].kept
            async with model.trace("a"):
                hidden = pair = 0
            assert isinstance(hidden, interpose.RemoteValue) and hidden.shape == (2000,)
            assert np.array_equal(await hidden[-2:].fetch(), [1998, 1999])
            service.script = finish
            async with model.trace("b"):
                print(hidden[0], pair)
            assert "tensor" not in {value.WhichOneof("kind") for value in service.traces[-1].scope.values}
            assert (await s.describe()).session_id == s.id
        assert np.array_equal(hidden, numbers(2000)) and np.array_equal(pair[0], numbers(900))
        assert service.closed[-1].session_id == "s0"


async def test_a_session_that_is_found_again(service):
    service.script = saves(hidden=numbers(2000))
    async with await connected(service) as client:
        model = await client.model()
        with pytest.raises(asyncio.CancelledError):
            async with client.session() as s:
                session_id = s.id
                async with model.trace("a", blocking=False) as tracer:
                    pass
                raise asyncio.CancelledError
        assert not service.closed, "whoever is cancelled comes back"
        again = client.session(session_id)
        assert np.array_equal(await (await again.saved())["hidden"].fetch(), numbers(2000))
        assert [job.id for job in await again.traces()] == [tracer.job.id]
        await again.close()
        assert service.closed[-1].session_id == session_id
        with pytest.raises(interpose.NotFound):
            async with client.session("nonsense"):
                raise AssertionError


async def test_an_error_in_the_block_and_values_that_are_gone(service):
    service.script = saves(hidden=numbers(2000))
    async with await connected(service) as client:
        model = await client.model()
        with pytest.raises(ZeroDivisionError):
            async with client.session():
                async with model.trace("a"):
                    hidden = 0
                1 / 0
        assert np.array_equal(hidden, numbers(2000))
        with pytest.raises(interpose.NotFound, match="not on the server any more"):
            async with client.session():
                async with model.trace("a"):
                    hidden = 0
                service.refusals["Fetch"] = [ServiceFailure(failure(trace_pb2.ERROR_CODE_NOT_FOUND, "too old"))]


async def test_sessions_of_two_tasks(service):
    """Each task has its own; a trace runs in that of its task."""
    async with await connected(service) as client:
        model = await client.model()
        used = {}

        async def task(name):
            async with client.session() as s:
                await asyncio.sleep(0.05)
                async with model.trace(name):
                    pass
                used[name] = s.id
                assert model.session.id == s.id

        await asyncio.gather(task("a"), task("b"))
        assert len(set(used.values())) == 2 and model.session.id not in used.values()
