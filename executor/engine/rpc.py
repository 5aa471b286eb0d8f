"""Calls to all workers of an engine, beside its steps; a call ends when the engine does.

vLLM waits for the answer of an engine that has died as long as for the answer of a living engine, which is ten minutes here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from executor.plugin.processes import MOST_SECONDS

RPC_SECONDS = 600.0
LOOK_SECONDS = 1.0
AT_ONCE = 32  # blocks that one call ends
_PROCESS_SECONDS = 0.05  # between looks for a sandboxed process


class Engine(Protocol):
    """What the calls need of vLLM's AsyncLLM."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]: ...

    async def check_health(self) -> None: ...


class Endings:
    """Ends blocks in the workers. Blocks that end at the same time are ended by one call.

    Args:
        engine: the engine of the workers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[tuple[tuple[str, int, dict[str, Any]], asyncio.Future[list[Any]]]] = []
        self._task: asyncio.Task[None] | None = None

    async def end(self, trace_id: str, invoke: int, result: dict[str, Any]) -> list[Any]:
        """End an invoke's block; return the answers of `interpose_finish` by rank.

        Args:
            result: the invoke's result, as `Result.to_plain` gives it.

        Raises:
            EngineDeadError, TimeoutError: as `call_workers`.
        """
        answers: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append(((trace_id, invoke, result), answers))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._call())
        return await answers

    async def _call(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
            some = [(call, answers) for call, answers in some if not answers.done()]  # else the trace was cancelled
            if not some:
                continue
            try:
                replies = await call_workers(self._engine, "interpose_finish_all", [call for call, _ in some])
            except Exception as error:
                for _, answers in some:
                    if not answers.done():
                        answers.set_exception(error)
                continue
            for number, (_, answers) in enumerate(some):
                if not answers.done():
                    answers.set_result([of_rank[number] for of_rank in replies])


async def call_workers(engine: Engine, method: str, *args: Any) -> list[Any]:
    """Call a method of every worker; return the answers by rank.

    Raises:
        EngineDeadError: the engine is dead, or died before all workers had answered.
        TimeoutError: the workers took longer than `RPC_SECONDS`.
    """
    call = asyncio.ensure_future(engine.collective_rpc(method, timeout=RPC_SECONDS, args=args))
    try:
        while not (await asyncio.wait({call}, timeout=LOOK_SECONDS))[0]:
            await engine.check_health()
        return call.result()
    finally:
        call.cancel()


async def until_there_is_a_process(engine: Engine) -> None:
    """Wait for a sandboxed process as requests do, while the steps of others go on.

    Raises:
        EngineDeadError, TimeoutError: as `call_workers`.
    """
    latest = time.monotonic() + MOST_SECONDS
    while not all(await call_workers(engine, "interpose_has_process")) and time.monotonic() < latest:
        await asyncio.sleep(_PROCESS_SECONDS)
