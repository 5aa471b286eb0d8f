"""Calls to all workers of an engine, beside its steps; a call ends when the engine does.

vLLM waits for the answer of an engine that has died as long as for the answer of a living engine, which is ten minutes here.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

RPC_SECONDS = 600.0
LOOK_SECONDS = 1.0


class Engine(Protocol):
    """What the calls need of vLLM's AsyncLLM."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]: ...

    async def check_health(self) -> None: ...


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
