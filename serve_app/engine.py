"""The deployment that holds one engine: it runs traces, reports, and is replaced if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve

from actors.caller_watch import CallerWatch
from actors.failures import unavailable
from actors.find_directory import directory, own_directory
from actors.grouped import Item, merged
from actors.protocol import ReplicaReport, StartFailed, Target
from actors.telemetry.options import Options
from executor.cluster.checkpoint import check_model
from executor.cluster.start_failure import CannotStart, StartFailure, failure_of
from executor.core.request import flow_of
from executor.core.startup import REPLICA_VARIABLE
from interpose.contract.errors import ServiceFailure
from interpose.contract.result import Result
from interpose.wire.request import TraceRequest
from serve_app.engine_telemetry import EngineTelemetry
from serve_app.ingress.listening import replica_on_this_machine
from serve_app.settings import ModelSettings, SessionSettings
from serve_app.tenants.seats import Seats
from serve_app.tokenizer import chunks, tokenizer_files

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
# Tries to find a trace that is to be aborted, and seconds between them.
ABORT_TRIES, ABORT_SECONDS = 20, 0.1
# After this time Serve reports the deployment as failed, and tries some times more.
NAME_SECONDS = 60.0


class EngineDeployment:
    """One replica of a model. Serve awaits the constructor; then the replica is ready.

    Args:
        model: settings of the model.
        sessions: settings for the directory, if this replica has to make it.
        options: what the replica writes for operators.
        engine_metrics: whether vLLM's own metrics are exported.

    Raises:
        CannotStart: the engine does not start, or another application serves a model of that name. Serve tries again some
            times. Where no further attempt can succeed, the next attempts end at once, so that the deployment fails soon.
    """

    async def __init__(  # type: ignore[misc]
        self,
        model: ModelSettings,
        sessions: SessionSettings,
        options: Options | None = None,
        engine_metrics: bool = True,
    ) -> None:
        replica_on_this_machine()
        self._telemetry = EngineTelemetry(options)
        self._model = model
        self._session_settings = sessions
        self._directory = own_directory(sessions)
        context = serve.get_replica_context()
        self._target = Target(context.app_name, context.deployment)
        self._replica = context.replica_id.unique_id
        self._attempt = f"{context.code_version} on {ray.get_runtime_context().get_node_id()}"
        self._stage = "waiting for its seat"
        self._engine: Any = None
        self._healthy = True
        self._callers = CallerWatch()
        self._traces: dict[str, asyncio.Task[Any]] = {}  # the task that runs each trace, by the trace's key
        self._seats = Seats(model.max_running_traces, model.max_waiting_traces)
        self._reporter = asyncio.create_task(self._keep_reporting())
        try:
            await self._wait_for_name()
            await self._load(engine_metrics)
        except Exception as error:
            self._healthy = False
            failure = failure_of(error)
            logger.error("the engine cannot start", exc_info=error)
            await self._report(StartFailed(failure.reason, failure.permanent, self._attempt))
            raise CannotStart(failure) from None
        except BaseException:
            self._healthy = False
            await self._report()
            raise

    async def _wait_for_name(self) -> None:
        """Wait until no other application serves a model of this name.

        An application that is being removed keeps its models' names until its replicas have finished their traces.
        """
        deadline = time.monotonic() + NAME_SECONDS
        while refusal := await self._report():
            if time.monotonic() > deadline:
                raise ValueError(refusal)
            await asyncio.sleep(REPORT_SECONDS)

    async def _load(self, metrics: bool) -> None:
        known = await self._directory.start_failure.remote(self._target, self._model, self._attempt)
        if known is not None:
            raise CannotStart(StartFailure(known.reason, known.permanent))
        self._stage = "looking for the model's files"
        await asyncio.to_thread(check_model, self._model)
        # Workers and the engine's own process join the replica's cluster, not a cluster of their own.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        os.environ[REPLICA_VARIABLE] = self._replica
        self._stage = "importing the engine"
        engine_class = await asyncio.to_thread(_import_engine)
        self._engine = await engine_class.start(self._model, self._set_stage, metrics)
        self._stage = ""
        await self._report()

    async def run_all(self, requests: list[TraceRequest]) -> AsyncGenerator[list[Item], None]:
        """Run some traces; yield what `run` yields for each (see `merged`)."""
        async with contextlib.aclosing(merged([self.run(request) for request in requests])) as items:
            async for some in items:
                yield some

    async def abort(self, key: str) -> None:
        """End a trace whose call goes on for other traces.

        The call that brings the trace may come after this one.
        """
        for _ in range(ABORT_TRIES):
            if (task := self._traces.get(key)) is not None:
                task.cancel()
                return
            await asyncio.sleep(ABORT_SECONDS)

    async def run(self, request: TraceRequest) -> AsyncGenerator[bytes, None]:
        """Run a trace; yield this replica's name first, then serialized events.

        The name says that this replica has taken the trace.

        Args:
            request: the trace. Traces of tenants and of sessions take turns.

        Raises:
            ServiceFailure: the trace as a whole cannot run.
        """
        from executor.engine.failures import TraceFailed

        task = asyncio.current_task()
        assert task is not None
        self._traces[request.key] = task
        try:
            yield self._replica.encode()
            events = self._telemetry.spanned(request, self._in_turn(request))
            async with contextlib.aclosing(self._callers.while_alive(request.session, events)) as alive:
                async for event in alive:
                    yield event
        except TraceFailed as error:
            raise ServiceFailure(error.failure) from None
        finally:
            del self._traces[request.key]

    async def _in_turn(self, request: TraceRequest) -> AsyncGenerator[bytes, None]:
        results: dict[int, Result] = {}
        async with (
            self._seats.seat(flow_of(request), request.tokens) as seat,
            contextlib.aclosing(self._engine.run(request, results)) as events,
        ):
            try:
                async for event in events:
                    yield event
            finally:
                if results:  # else the trace counts with what it might have needed
                    seat.used = sum(len(one.prompt_token_ids) + len(one.token_ids) for one in results.values())

    async def ping(self) -> None:
        """Do nothing: the caller is connected afterwards."""

    async def describe(self, model: ModelSettings) -> bytes:
        """Return the serialized `ModelDescription`.

        Args:
            model: the caller's settings of this model. While replicas are replaced, there are replicas with other settings too.

        Raises:
            ServiceFailure: UNAVAILABLE, this replica has other settings.
        """
        if model != self._model:
            raise ServiceFailure(unavailable(f"replicas of {model.name} are being replaced by others"))
        return self._engine.describe().SerializeToString()

    async def tokenizer(self) -> AsyncGenerator[bytes, None]:
        """Yield the tokenizer's files as serialized `TokenizerChunk`s."""
        engine = self._model.engine
        source = engine.get("tokenizer") or self._model.model
        files = await asyncio.to_thread(
            tokenizer_files, source, engine.get("tokenizer_revision", engine.get("revision"))
        )
        for chunk in chunks(files, self._model.limits.chunk_bytes):
            yield chunk.SerializeToString()

    async def check_health(self) -> None:
        """Raise if the engine is broken. Serve calls this and replaces the replica when it raises."""
        if self._engine is None:
            return
        try:
            await self._engine.check_health()
        except Exception:
            self._healthy = False
            await self._report()
            raise

    async def __del__(self) -> None:
        # Serve awaits the destructor when it stops a replica; there is no other hook.
        self._reporter.cancel()
        engine, self._engine = self._engine, None
        self._healthy = False
        await self._report()
        if engine is not None:
            await engine.shutdown()
        await asyncio.to_thread(self._telemetry.close)

    def _set_stage(self, stage: str) -> None:
        self._stage = stage

    async def _keep_reporting(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                await self.check_health()
            try:
                try:
                    await self._report()
                except ray.exceptions.RayActorError:
                    self._directory = directory(self._session_settings)
            except Exception:
                logger.exception("a report failed")  # without further reports the directory takes this replica for gone
            await self._callers.look()
            await self._telemetry.look(self._engine)
            await asyncio.sleep(REPORT_SECONDS)

    async def _report(self, failed: StartFailed | None = None) -> str:
        running, waiting = self._engine.load() if self._engine is not None else (0, 0)
        waiting += self._seats.waiting
        report = ReplicaReport(
            self._target,
            self._model,
            self._replica,
            self._stage,
            self._healthy,
            running,
            waiting,
            failed,
            self._telemetry.counters,
        )
        refusal: str = await self._directory.report.remote(report)
        return refusal


def _import_engine() -> Any:
    from executor.engine.engine import TraceEngine

    return TraceEngine
