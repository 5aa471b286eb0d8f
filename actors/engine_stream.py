"""A session's calls to engine replicas.

Events are passed on as they come. A call never waits for an engine that does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import ActorDiedError

from actors.failures import unavailable
from actors.protocol import ModelState, Route, Target
from actors.taking import taking
from interpose.contract.errors import ServiceFailure
from interpose.wire.request import TraceRequest

POLL_SECONDS = 1.0


class EngineCalls:
    """Calls engine replicas through Serve, which counts the calls of each replica.

    A session's calls go to the session's own replica.

    Args:
        session: the session actor's name; workers send saved values and logs there.
        directory: handle of the directory, which knows the engines' state.
    """

    def __init__(self, session: str, directory: Any) -> None:
        self._session = session
        self._directory = directory
        self._handles: dict[Target, Any] = {}

    def warm(self, target: Target) -> None:
        """Prepare for the first call to an engine.

        Finding the engine's replicas takes a while, and the first call would wait for it.
        """
        self._handle(target).options(stream=False, method_name="ping").remote()

    async def run(self, route: Route, request: TraceRequest) -> AsyncGenerator[bytes, None]:
        """Run a trace on one replica; yield its serialized events.

        Closing the generator aborts the trace's requests.

        Args:
            route: names the replica. If the replica is draining, another replica takes the trace.
            request: the trace to run.

        Raises:
            ServiceFailure: UNAVAILABLE, no engine can take the trace.
        """
        handle = self._handle(route.target).options(session_id=route.replica)
        responses = handle.remote(dataclasses.replace(request, session=self._session))
        replica = route.replica
        try:
            # The engine's first item says which replica has taken the trace.
            replica = await self._taken(route.target, request.trace_id, responses)
            if replica != route.replica:
                self._directory.moved.remote(request.session_id, route.target, replica)
            async for data in responses:
                yield data
        except ActorDiedError:
            if replica:
                self._directory.lost.remote(replica)
            raise
        finally:
            responses.cancel()

    def _handle(self, target: Target) -> Any:
        from ray import serve

        if target not in self._handles:
            # The directory knows whether the deployment still exists. Asking Serve here would block the event loop.
            handle = serve.get_deployment_handle(target.deployment, target.app, _check_exists=False)
            self._handles[target] = handle.options(stream=True, method_name="run")
        return self._handles[target]

    async def _taken(self, target: Target, trace_id: str, responses: Any) -> str:
        """Wait until a replica has taken the trace; return its name."""
        first = asyncio.ensure_future(anext(responses))
        try:
            while not first.done():
                await asyncio.wait({first}, timeout=POLL_SECONDS)
                if not first.done():
                    await self._check(target, trace_id)
            return bytes(first.result()).decode()
        finally:
            first.cancel()
            with contextlib.suppress(BaseException):
                await first

    async def _check(self, target: Target, trace_id: str) -> None:
        state: ModelState = await self._directory.model_state.remote(target)
        if state.state != "RUNNING":
            raise ServiceFailure(unavailable(f"the engine is {state.state.lower()}", trace_id))
        if taking(target) == frozenset():
            raise ServiceFailure(unavailable("no replica of the engine takes traces now", trace_id))
