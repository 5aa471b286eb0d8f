"""Calls to an engine's workers, with an engine that is scripted: nobody waits for one that has died."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from executor.engine import rpc
from executor.engine.rpc import RPC_SECONDS, call_workers


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
