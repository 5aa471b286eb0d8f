"""A session's calls to engine replicas.

Events are passed on as they come. A call never waits for an engine that does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors.failures import unavailable
from actors.grouped import SMALL_BYTES, Grouped, Item
from actors.protocol import ModelState, Route, Target
from actors.taking import taking
from interpose.contract.errors import ServiceFailure
from interpose.wire.request import TraceRequest

POLL_SECONDS = 1.0
_MAX_ROUTES = 256


class EngineCalls:
    """Calls engine replicas through Serve, which counts the calls of each replica.

    A session's calls go to the session's own replica.

    Args:
        session: the session actor's name; workers send saved values and logs there. Or the name of another caller, whose
            requests have no block.
        directory: handle of the directory, which knows the engines' state.
        grpc: whether calls go over gRPC, which is cheaper than over Ray. On several machines Ray is better: it notices within
            seconds that a machine is cut off.

    Attributes:
        directory: as given; the caller replaces it if the directory has died.
    """

    def __init__(self, session: str, directory: Any, grpc: bool = False) -> None:
        self._session = session
        self._grpc = grpc
        self.directory = directory
        self._handles: dict[Target, Any] = {}
        self._calls: dict[Route, Grouped[TraceRequest]] = {}

    def warm(self, target: Target) -> None:
        """Prepare for the first call to an engine.

        Finding the engine's replicas takes a while, and the first call would wait for it.
        """
        self._handle(target).options(stream=False, method_name="ping").remote()

    async def run(self, route: Route, request: TraceRequest) -> AsyncGenerator[bytes, None]:
        """Run a trace on one replica; yield its serialized events.

        Closing the generator aborts the trace's requests. Traces that come at about the same time share a call.

        Args:
            route: names the replica. If the replica is draining, another replica takes the trace.
            request: the trace to run.

        Raises:
            ServiceFailure: UNAVAILABLE, no engine can take the trace.
        """
        responses = self._calls_to(route).stream(dataclasses.replace(request, session=self._session))
        replica = route.replica
        try:
            # The engine's first item says which replica has taken the trace.
            replica = await self._taken(route.target, request.trace_id, responses)
            if replica != route.replica:
                self.directory.moved.remote(request.session_id, route.target, replica)
            async for data in responses:
                yield data
        except (ActorDiedError, ActorUnavailableError):  # the second is what Serve says of a call over gRPC
            if replica:
                self.directory.lost.remote(replica)
            raise
        finally:
            await responses.aclose()

    def _calls_to(self, route: Route) -> Grouped[TraceRequest]:
        """Return the calls that run traces on a replica."""
        known = self._calls.get(route)
        if known is not None:
            return known
        handle = self._handle(route.target).options(session_id=route.replica)

        async def run_all(requests: list[TraceRequest]) -> AsyncGenerator[list[Item], None]:
            responses = handle.remote(requests)
            try:
                async for some in responses:
                    yield some
            finally:
                responses.cancel()

        def left(request: TraceRequest) -> None:
            handle.options(stream=False, method_name="abort").remote(request.key)

        if len(self._calls) > _MAX_ROUTES:
            self._calls.clear()
        made = Grouped(run_all, lambda request: route.counted or request.size > SMALL_BYTES, left)
        self._calls[route] = made
        return made

    def _handle(self, target: Target) -> Any:
        from ray import serve

        if target not in self._handles:
            # The directory knows whether the deployment still exists. Asking Serve here would block the event loop.
            handle = serve.get_deployment_handle(target.deployment, target.app, _check_exists=False)
            handle = handle.options(stream=True, method_name="run_all")
            self._handles[target] = handle.options(_by_reference=False) if self._grpc else handle
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
        state: ModelState = await self.directory.model_state.remote(target)
        if state.state != "RUNNING":
            raise ServiceFailure(unavailable(f"the engine is {state.state.lower()}", trace_id))
        if taking(target) == frozenset():
            raise ServiceFailure(unavailable("no replica of the engine takes traces now", trace_id))
