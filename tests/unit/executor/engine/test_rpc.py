"""Calls to an engine's workers, with an engine that is scripted: nobody waits for one that has died."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from executor.engine import rpc
from executor.engine.rpc import AT_ONCE, RPC_SECONDS, Endings, call_workers


class EngineDead(Exception):
    """As vLLM's, which needs vLLM."""


class Engine:
    """An engine that answers after some looks at its health, or dies then."""

    def __init__(self, looks: int, dies: bool) -> None:
        self._left = looks
        self._dies = dies
        self._answer = asyncio.Event()
        self.asked: list[tuple[Any, ...]] = []
        self.cancelled = False

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked.append((method, timeout, *args))
        try:
            await self._answer.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return ["a", "b"]

    async def check_health(self) -> None:
        self._left -= 1
        if self._left <= 0:
            if self._dies:
                raise EngineDead
            self._answer.set()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "LOOK_SECONDS", 0.01)


async def test_an_answer_may_take_long() -> None:
    engine = Engine(looks=3, dies=False)
    assert await asyncio.wait_for(call_workers(engine, "interpose_finish", "t", 0), 20) == ["a", "b"]
    assert engine.asked == [("interpose_finish", RPC_SECONDS, "t", 0)]


async def test_an_engine_that_dies_ends_the_call() -> None:
    engine = Engine(looks=3, dies=True)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(call_workers(engine, "interpose_finish"), 20)
    await asyncio.sleep(0)
    assert engine.cancelled


async def test_whoever_does_not_want_it_any_more_ends_it_too() -> None:
    engine = Engine(looks=10**9, dies=False)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call_workers(engine, "interpose_drop"), 0.05)
    await asyncio.sleep(0)
    assert engine.cancelled


class Workers:
    """Two ranks that say which block they have ended, when they may.

    Attributes:
        gate: is set while they answer.
        calls: the blocks of each call.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[list[Any]] = []
        self.error: Exception | None = None

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        assert method == "interpose_finish_all"
        [blocks] = args
        self.calls.append(blocks)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [[(rank, *block) for block in blocks] for rank in (0, 1)]

    async def check_health(self) -> None:
        pass


async def test_blocks_that_end_at_the_same_time_are_ended_by_one_call() -> None:
    workers = Workers()
    endings = Endings(workers)
    count = AT_ONCE + 3
    answers = await asyncio.gather(*(endings.end("t", number, {"text": "x"}) for number in range(count)))
    assert answers == [[(rank, "t", number, {"text": "x"}) for rank in (0, 1)] for number in range(count)]
    assert [len(blocks) for blocks in workers.calls] == [AT_ONCE, 3]
    assert await endings.end("u", 0, {}) == [(0, "u", 0, {}), (1, "u", 0, {})]


async def test_a_trace_that_is_cancelled_takes_no_other_with_it() -> None:
    workers = Workers()
    workers.gate.clear()
    endings = Endings(workers)
    sent = asyncio.create_task(endings.end("a", 0, {}))
    await asyncio.sleep(0.01)
    gone, stays = (asyncio.create_task(endings.end(name, 0, {})) for name in "bc")
    await asyncio.sleep(0)
    sent.cancel()
    gone.cancel()
    await asyncio.sleep(0)
    workers.gate.set()
    assert await stays == [(0, "c", 0, {}), (1, "c", 0, {})]
    assert [[block[0] for block in blocks] for blocks in workers.calls] == [["a"], ["c"]]


async def test_all_blocks_of_a_call_that_fails_get_its_error() -> None:
    workers = Workers()
    workers.error = EngineDead()
    endings = Endings(workers)
    ended = await asyncio.gather(*(endings.end("t", number, {}) for number in range(2)), return_exceptions=True)
    assert [type(one) for one in ended] == [EngineDead, EngineDead]
