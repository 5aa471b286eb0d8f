"""The watch of callers: a call whose caller is gone ends, everything else goes through unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from actors import caller_watch
from actors.caller_watch import CallerWatch


class Numbers:
    """A generator that waits before each number, and knows how it ended."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.closed = False
        self._count = count
        self._seconds = seconds

    async def __call__(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self._count):
                await asyncio.sleep(self._seconds)
                yield number
        finally:
            self.closed = True


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    sessions: set[str] = set()
    monkeypatch.setattr(caller_watch, "_exists", lambda session: session not in sessions)
    return sessions


async def test_everything_goes_through(gone: set[str]) -> None:
    watch = CallerWatch()
    numbers = Numbers(3)
    assert [number async for number in watch.while_alive("s", numbers())] == [0, 1, 2]
    assert numbers.closed
    assert not watch._calls
    await watch.look()


async def test_the_traces_of_a_lost_session_end_and_no_others(gone: set[str]) -> None:
    watch = CallerWatch()
    lost, kept = Numbers(2, 30.0), Numbers(2, 0.05)

    async def collect(session: str, numbers: Numbers) -> list[int]:
        return [number async for number in watch.while_alive(session, numbers())]

    tasks = [asyncio.create_task(collect("lost", lost)), asyncio.create_task(collect("kept", kept))]
    await asyncio.sleep(0)
    gone.add("lost")
    await watch.look()
    assert await asyncio.wait_for(tasks[0], 5) == []
    assert lost.closed
    assert await tasks[1] == [0, 1]
    assert not watch._calls


async def test_closing_it_closes_the_trace(gone: set[str]) -> None:
    watch = CallerWatch()
    numbers = Numbers(5)
    alive = watch.while_alive("s", numbers())
    assert await anext(alive) == 0
    await alive.aclose()
    assert numbers.closed


async def test_errors_pass(gone: set[str]) -> None:
    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise KeyError("x")

    with pytest.raises(KeyError):
        async for _ in CallerWatch().while_alive("s", broken()):
            pass


async def test_cancelling_the_reader_cancels_the_trace(gone: set[str]) -> None:
    numbers = Numbers(5, 30.0)

    async def read() -> None:
        async for _ in CallerWatch().while_alive("s", numbers()):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert numbers.closed
