"""A session's call to an engine replica: events as they come, and no waiting for an engine that is not there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import ActorDiedError

from actors.failures import unavailable
from actors.protocol import ModelState, Order, Target
from actors.taking import taking
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb

POLL_SECONDS = 1.0


class EngineCalls:
    """Calls engines through Serve, so that it counts what a replica does, at the replica that is the session's.

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

    async def run(self, order: Order, trace: pb.Trace) -> AsyncGenerator[pb.Event, None]:
        """Run a trace on one replica; closing the generator aborts its requests.

        Args:
            order: says which replica; another one takes the trace if that one takes none any more.
            trace: what to run.

        Raises:
            ServiceFailure: UNAVAILABLE, there is no engine that could take it.
        """
        handle = self._handle(order.target).options(session_id=order.replica)
        whose = (order.tenant, order.session_id, order.share)
        responses = handle.remote(trace.SerializeToString(), self._session, whose)
        replica = order.replica
        try:
            # The engine's first item says which replica has taken the trace.
            replica = await self._taken(order.target, trace.id, responses)
            if replica != order.replica:
                self._directory.moved.remote(order.session_id, order.target, replica)
            async for data in responses:
                yield pb.Event.FromString(data)
        except ActorDiedError:
            if replica:
                self._directory.lost.remote(replica)
            raise
        finally:
            responses.cancel()

    def _handle(self, target: Target) -> Any:
        from ray import serve

        if target not in self._handles:
            # Whether it is still there the directory knows; asking here would stop everything else meanwhile.
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
