"""A session's call to an engine replica: events as they come, and no waiting for an engine that is not there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from actors.failures import unavailable
from actors.protocol import ModelState, Target
from interpose.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb

POLL_SECONDS = 1.0


class EngineCalls:
    """Calls engines through Serve, which chooses the replica.

    Args:
        session: the session actor's name; workers send saved values and logs there.
        directory: handle of the directory, which knows what state the engines are in.
    """

    def __init__(self, session: str, directory: Any) -> None:
        self._session = session
        self._directory = directory
        self._handles: dict[Target, Any] = {}

    def warm(self, target: Target) -> None:
        """Get everything ready that the first call would otherwise wait for: finding the replicas takes a while."""
        self._handle(target).options(stream=False, method_name="ping").remote()

    async def run(self, target: Target, trace: pb.Trace) -> AsyncGenerator[pb.Event, None]:
        """Run a trace on one replica; closing the generator aborts its requests.

        Raises:
            ServiceFailure: UNAVAILABLE, there is no engine that could take it.
        """
        responses = self._handle(target).remote(trace.SerializeToString(), self._session)
        try:
            # The engine's first item is empty: it says that a replica has taken the trace.
            await self._taken(target, trace.id, responses)
            async for data in responses:
                yield pb.Event.FromString(data)
        finally:
            responses.cancel()

    def _handle(self, target: Target) -> Any:
        from ray import serve

        if target not in self._handles:
            handle = serve.get_deployment_handle(target.deployment, target.app)
            self._handles[target] = handle.options(stream=True, method_name="run")
        return self._handles[target]

    async def _taken(self, target: Target, trace_id: str, responses: Any) -> None:
        first = asyncio.ensure_future(anext(responses))
        try:
            while not first.done():
                await asyncio.wait({first}, timeout=POLL_SECONDS)
                if not first.done():
                    await self._check(target, trace_id)
            first.result()
        finally:
            first.cancel()
            with contextlib.suppress(BaseException):
                await first

    async def _check(self, target: Target, trace_id: str) -> None:
        state: ModelState = await self._directory.model_state.remote(target.deployment)
        if state.state != "RUNNING":
            raise ServiceFailure(unavailable(f"the engine is {state.state.lower()}", trace_id))
