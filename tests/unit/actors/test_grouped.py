"""Callers share a call while another call is being opened, and none of them notices the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import pytest

from actors.grouped import MOST, Grouped, Item, merged
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb


class Service:
    """Answers each request with its letters; a request with a "!" fails, and one with a "?" waits.

    Attributes:
        calls: the requests of each call.
        gate: is set while calls are opened.
        closed: requests whose streams were closed before their end.
        left: requests whose callers left while their call went on.
        error: what a call raises after its first items.
    """

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed: list[str] = []
        self.error: Exception | None = None
        self.left: list[str] = []
        self.grouped = Grouped(self.open, alone=str.isupper, left=self.left.append)

    async def open(self, requests: list[str]) -> AsyncGenerator[Sequence[Item], None]:
        self.calls.append(requests)
        await self.gate.wait()
        async with contextlib.aclosing(merged([self.letters(request) for request in requests])) as items:
            async for some in items:
                yield some
                if self.error is not None:
                    raise self.error

    async def letters(self, request: str) -> AsyncGenerator[bytes, None]:
        try:
            for letter in request:
                if letter == "!":
                    raise ServiceFailure(failure(pb.ERROR_CODE_ENGINE, f"{request} failed"))
                if letter == "?":
                    await asyncio.Event().wait()
                yield letter.encode()
                await asyncio.sleep(0)
        except (GeneratorExit, asyncio.CancelledError):
            self.closed.append(request)
            raise

    async def read(self, request: str) -> str:
        return b"".join([data async for data in self.grouped.stream(request)]).decode()


@pytest.fixture
async def service() -> Service:
    return Service()


async def test_callers_that_come_while_a_call_is_opened_share_the_next(service: Service) -> None:
    service.gate.clear()
    reading = [asyncio.create_task(service.read(text)) for text in ("ab", "c", "def", "")]
    await asyncio.sleep(0)
    assert service.calls == [] and not any(task.done() for task in reading)
    await asyncio.sleep(0)
    assert service.calls == [["ab"]]
    service.gate.set()
    assert await asyncio.gather(*reading) == ["ab", "c", "def", ""]
    assert service.calls == [["ab"], ["c", "def", ""]]


async def test_a_call_that_does_not_open_holds_up_no_other(service: Service) -> None:
    first = asyncio.create_task(service.read("?"))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(service.read("ab"), 5) == "ab"
    first.cancel()
    await asyncio.wait({first})
    await asyncio.sleep(0.01)
    assert service.closed == ["?"]


async def test_a_failure_is_its_callers_own(service: Service) -> None:
    service.gate.clear()
    reading = [asyncio.create_task(service.read(text)) for text in ("first", "ab!", "cd")]
    await asyncio.sleep(0.001)
    service.gate.set()
    first, failed, fine = await asyncio.gather(*reading, return_exceptions=True)
    assert (first, fine) == ("first", "cd") and service.calls[1] == ["ab!", "cd"]
    assert isinstance(failed, ServiceFailure) and failed.failure.message == "ab! failed"


async def test_an_error_of_the_call_ends_all_its_callers(service: Service) -> None:
    service.gate.clear()
    reading = [asyncio.create_task(service.read(text)) for text in ("first", "a?", "b?")]
    await asyncio.sleep(0.001)
    service.error = ConnectionError("gone")
    service.gate.set()
    ended = await asyncio.gather(*reading, return_exceptions=True)
    assert [type(one) for one in ended] == [ConnectionError] * 3


async def test_a_caller_that_leaves_takes_no_other_with_it(service: Service) -> None:
    service.gate.clear()
    reading = [asyncio.create_task(service.read(text)) for text in ("first", "a?", "bcd", "e?", "f?")]
    await asyncio.sleep(0.001)
    reading[1].cancel()
    service.gate.set()
    assert await reading[2] == "bcd"
    assert service.calls[1:] == [["bcd", "e?", "f?"]], "who left before its call was opened asks for nothing"
    reading[3].cancel()
    await asyncio.wait({reading[3]})
    assert service.left == ["e?"] and service.closed == []
    reading[4].cancel()
    await asyncio.wait(reading)
    await asyncio.sleep(0.01)
    assert service.left == ["e?"]
    assert sorted(service.closed) == ["e?", "f?"], "the call is closed when all its callers have left"


async def test_some_requests_share_no_call_and_calls_have_a_bound(service: Service) -> None:
    service.gate.clear()
    texts = ["first", "LARGE", "ALSO", *["b"] * (MOST + 1)]
    reading = [asyncio.create_task(service.read(text)) for text in texts]
    await asyncio.sleep(0.001)
    service.gate.set()
    assert await asyncio.gather(*reading) == texts
    assert [len(call) for call in service.calls] == [1, 1, 1, MOST, 1]
