"""The ingress: the Interpose service and gRPC health, as a Serve deployment.

The ingress checks calls and forwards them to sessions.

Size: a method for each call of the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Any

import ray
from grpc_health.v1 import health_pb2
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.handle import DeploymentHandle

from actors.directory import HEARTBEAT_SECONDS
from actors.failures import describe, not_found, unavailable
from actors.find_directory import directory, own_directory
from actors.protocol import Announced, DirectoryStatus, Lease, ModelState, Route
from actors.saved import Saved
from interpose.contract.errors import ServiceFailure, failure
from interpose.contract.version import PROTOCOL, PYTHON_VERSION, VERSION
from interpose.v1 import model_pb2, service_pb2
from interpose.v1 import trace_pb2 as pb
from serve_app import admission, replies
from serve_app.calls import Serialized, streaming, unary
from serve_app.chunks import chunks
from serve_app.listening import replica_on_this_machine
from serve_app.models import ServedModel, ServedModels
from serve_app.requests import Submitted, request_of
from serve_app.settings import Settings, Tenant

logger = logging.getLogger(__name__)

SERVICE = "interpose.v1.Interpose"
# The service name that a readiness probe asks for: it is healthy if calls arrive here through the proxy, whatever the models do.
PROXY = "proxy"
CALL_SECONDS = 10.0
_MAX_CACHED_LEASES = 4096
_LONG_MESSAGE = 256 * 1024
# Methods that cannot be repeated at the actor that takes a dead actor's place: uploads are gone, and clients send them again.
_NEED_UPLOADS = ("run", "start")
# Health watchers at a time. Each watcher holds one of the ingress's calls and needs no key.
MAX_WATCHERS = 64


class IngressDeployment:
    """One replica of the ingress; another replica can find again everything that it keeps.

    Args:
        settings: settings of the whole service.
        engines: handle of each model's engine deployment, by the model's name.
    """

    def __init__(self, settings: Settings, engines: dict[str, DeploymentHandle]) -> None:
        replica_on_this_machine()
        # Sessions find the engines under the application's name, which the operator chooses when deploying it.
        app = serve.get_replica_context().app_name
        self.settings = settings
        self.max_message_bytes = _longest(settings)
        self._models = ServedModels(app, settings.models, engines)
        self._session_settings = settings.sessions
        self._directory = own_directory(settings.sessions)
        self._leases: OrderedDict[str, Lease] = OrderedDict()
        self._watchers = 0  # open `Watch` calls
        self._heart = asyncio.get_running_loop().create_task(self._beat())

    # Interpose

    @unary(service_pb2.HelloRequest, service_pb2.HelloReply)
    async def Hello(self, request: service_pb2.HelloRequest, tenant: Tenant) -> service_pb2.HelloReply:
        """Compare versions.

        An incompatible client gets the reply too, and learns which side to upgrade.
        """
        await self._look()
        return service_pb2.HelloReply(
            protocol=PROTOCOL,
            oldest_protocol=admission.OLDEST_PROTOCOL,
            server_version=VERSION,
            python_version=PYTHON_VERSION,
            models=[model.name for model in self.settings.models],
            limits=replies.limits(self.settings, tenant),
            tenant=tenant.name,
        )

    @unary(service_pb2.DescribeModelRequest, model_pb2.ModelDescription)
    async def DescribeModel(
        self, request: service_pb2.DescribeModelRequest, tenant: Tenant
    ) -> model_pb2.ModelDescription:
        """Describe a model."""
        return await self._description(await self._model(request.model))

    @streaming(service_pb2.GetTokenizerRequest, service_pb2.TokenizerChunk)
    async def GetTokenizer(
        self, request: service_pb2.GetTokenizerRequest, tenant: Tenant
    ) -> AsyncGenerator[service_pb2.TokenizerChunk, None]:
        """Send the tokenizer's files."""
        served = await self._model(request.model)
        _check_running(served, await self._directory.model_state.remote(served.target))
        async for data in served.engine.options(stream=True).tokenizer.remote():
            yield service_pb2.TokenizerChunk.FromString(data)

    @unary(service_pb2.OpenSessionRequest, service_pb2.OpenSessionReply)
    async def OpenSession(
        self, request: service_pb2.OpenSessionRequest, tenant: Tenant
    ) -> service_pb2.OpenSessionReply:
        """Open a session for a client."""
        lease = await self._open(tenant, request.kept)
        settings = self.settings.sessions
        return service_pb2.OpenSessionReply(
            session_id=lease.session_id,
            idle_seconds=settings.idle_seconds,
            retention_seconds=settings.retention_seconds,
        )

    @unary(service_pb2.CloseSessionRequest, service_pb2.CloseSessionReply)
    async def CloseSession(
        self, request: service_pb2.CloseSessionRequest, tenant: Tenant
    ) -> service_pb2.CloseSessionReply:
        """End a session, or leave its jobs running; a session that has ended already is no error."""
        self._leases.pop(request.session_id, None)
        await self._directory.close.remote(request.session_id, tenant.name, request.keep_jobs)
        return service_pb2.CloseSessionReply()

    @unary(service_pb2.UploadRequest, service_pb2.UploadReply)
    async def Upload(self, request: service_pb2.UploadRequest, tenant: Tenant) -> service_pb2.UploadReply:
        """Take one chunk of an upload."""
        admission.check_upload(request, self.settings.models[0].limits)
        lease = await self._lease(request.session_id, tenant)
        received = await self._ask(lease, "upload", request.digest, request.size, request.offset, request.data)
        return service_pb2.UploadReply(received=received)

    @streaming(service_pb2.UnparsedSubmit, pb.Event)
    async def Submit(self, request: service_pb2.UnparsedSubmit, tenant: Tenant) -> AsyncGenerator[Serialized, None]:
        """Run a trace, or follow a trace that was submitted before; a job is only started."""
        admission.check_protocol(request.protocol)
        trace = admission.parse(pb.Trace, request.trace, self.max_message_bytes)
        served = await self._model(trace.model)
        model, description = served.settings, await self._description(served)
        if len(request.trace) > _LONG_MESSAGE:
            remotes = await asyncio.to_thread(admission.check_trace, trace, model, tenant, description)
        else:
            remotes = admission.check_trace(trace, model, tenant, description)
        submitted = Submitted(request, trace, tenant, served, remotes)
        if request.session_id:
            events = self._run(await self._lease(request.session_id, tenant), submitted)
        else:
            events = self._run_in_own(submitted)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    @streaming(service_pb2.AttachRequest, pb.Event)
    async def Attach(self, request: service_pb2.AttachRequest, tenant: Tenant) -> AsyncGenerator[Serialized, None]:
        """Follow a trace that was submitted before.

        The events begin with the first one, or after the events that the client has seen.
        """
        lease = await self._lease(request.session_id, tenant)
        follower = uuid.uuid4().hex
        call = (lease.session_id, request.trace_id, follower, request.seen)
        async with contextlib.aclosing(self._follow(lease, "attach", request.trace_id, follower, *call)) as events:
            async for event in events:
                yield event

    @unary(service_pb2.DescribeJobRequest, service_pb2.JobStatus)
    async def DescribeJob(self, request: service_pb2.DescribeJobRequest, tenant: Tenant) -> service_pb2.JobStatus:
        """Return the state of a trace."""
        lease = await self._lease(request.session_id, tenant)
        return await self._ask(lease, "job", request.trace_id)

    @unary(service_pb2.DescribeSessionRequest, service_pb2.SessionDescription)
    async def DescribeSession(
        self, request: service_pb2.DescribeSessionRequest, tenant: Tenant
    ) -> service_pb2.SessionDescription:
        """Return what a session holds."""
        lease = await self._lease(request.session_id, tenant)
        return await self._ask(lease, "describe")

    @streaming(service_pb2.FetchRequest, service_pb2.FetchChunk)
    async def Fetch(
        self, request: service_pb2.FetchRequest, tenant: Tenant
    ) -> AsyncGenerator[service_pb2.FetchChunk, None]:
        """Send the bytes of a saved value, or of the part that indices select.

        The bytes come straight from this node's object store.
        """
        lease = await self._lease(request.session_id, tenant)
        [ref] = await self._ask(lease, "blob_ref", request.blob_id)
        value = await ref
        if request.HasField("view"):
            # Picking listed positions copies the value.
            value = await asyncio.to_thread(admission.selected, value, request.view)
        step = self.settings.models[0].limits.chunk_bytes
        for offset, data in chunks(value, request.offset, request.length, step, request.at_most):
            yield service_pb2.FetchChunk(offset=offset, data=data)
        given = request.length or value.nbytes - request.offset
        given = min(given, request.at_most or given)
        if request.offset + given == value.nbytes and not request.HasField("view"):
            lease.actor.ask.remote(lease.session_id, "fetched", request.blob_id)

    @unary(service_pb2.CancelRequest, service_pb2.CancelReply)
    async def Cancel(self, request: service_pb2.CancelRequest, tenant: Tenant) -> service_pb2.CancelReply:
        """Cancel a trace, and forget its values if the request says so."""
        lease = await self._lease(request.session_id, tenant)
        return service_pb2.CancelReply(found=await self._ask(lease, "cancel", request.trace_id, request.forget))

    @unary(service_pb2.StoreEditRequest, service_pb2.StoreEditReply)
    async def StoreEdit(self, request: service_pb2.StoreEditRequest, tenant: Tenant) -> service_pb2.StoreEditReply:
        """Store a standing edit."""
        admission.check_protocol(request.protocol)
        model = (await self._model(request.model)).settings
        await asyncio.to_thread(admission.check_edit, request.edit, model, tenant)
        await self._directory.store_edit.remote(tenant.name, model.name, request.edit)
        return service_pb2.StoreEditReply()

    @unary(service_pb2.ListEditsRequest, service_pb2.ListEditsReply)
    async def ListEdits(self, request: service_pb2.ListEditsRequest, tenant: Tenant) -> service_pb2.ListEditsReply:
        """List the tenant's standing edits."""
        model = (await self._model(request.model)).settings
        return await self._directory.list_edits.remote(tenant.name, model.name)

    @unary(service_pb2.ClearEditsRequest, service_pb2.ClearEditsReply)
    async def ClearEdits(self, request: service_pb2.ClearEditsRequest, tenant: Tenant) -> service_pb2.ClearEditsReply:
        """Drop standing edits of the tenant."""
        model = (await self._model(request.model)).settings
        cleared = await self._directory.clear_edits.remote(tenant.name, model.name, request.name)
        return service_pb2.ClearEditsReply(cleared=cleared)

    @unary(service_pb2.StatusRequest, service_pb2.StatusReply)
    async def Status(self, request: service_pb2.StatusRequest, tenant: Tenant) -> service_pb2.StatusReply:
        """Return the state of the models, the sessions and the caller's own tenant."""
        await self._look()
        status: DirectoryStatus = await self._directory.status.remote(self._models.targets)
        return replies.status(status, self._models, tenant)

    # grpc.health.v1.Health: a caller needs no key

    @unary(health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, keyless=True)
    async def Check(self, request: health_pb2.HealthCheckRequest, _: Tenant) -> health_pb2.HealthCheckResponse:
        """Return the health of a model or of the service.

        The service is SERVING while any model runs traces or would start for a request.
        `PROXY` is SERVING while the ingress answers.
        """
        return await self._health(request.service)

    @streaming(health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, keyless=True)
    async def Watch(
        self, request: health_pb2.HealthCheckRequest, _: Tenant
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Yield the health now and after each change."""
        if self._watchers >= MAX_WATCHERS:
            message = f"{MAX_WATCHERS} callers watch already: ask now and then with Check"
            raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message))
        self._watchers += 1
        try:
            last = None
            while True:
                health = await self._health(request.service)
                if health.status != last:
                    last = health.status
                    yield health
                await asyncio.sleep(1.0)
        finally:
            self._watchers -= 1

    # Releases of grpcio-health-checking before 1.85 do not have this method. A call of it is answered UNIMPLEMENTED then.
    if hasattr(health_pb2, "HealthListRequest"):

        @unary(health_pb2.HealthListRequest, health_pb2.HealthListResponse, keyless=True)
        async def List(self, _: health_pb2.HealthListRequest, __: Tenant) -> health_pb2.HealthListResponse:
            """Return the health of every service name."""
            serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
            return health_pb2.HealthListResponse(statuses={SERVICE: await self._health(""), PROXY: serving})

    # Internal

    async def _health(self, service: str) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse
        if service == PROXY:
            return kinds(status=kinds.SERVING)
        if service not in ("", SERVICE):
            return kinds(status=kinds.SERVICE_UNKNOWN)
        for served in self._models.all:
            if served.state(await self._directory.model_state.remote(served.target)) in ("RUNNING", "IDLE"):
                return kinds(status=kinds.SERVING)
        return kinds(status=kinds.NOT_SERVING)

    async def _model(self, name: str) -> ServedModel:
        """Return the model of a client's request; the model may have been deployed a moment ago."""
        if self.settings.model_named(name) is None:
            await self._look()
        return self._models[admission.model_for(self.settings, name).name]

    async def _look(self) -> None:
        """Update the list of models."""
        with contextlib.suppress(ray.exceptions.RayActorError):
            self._update(await self._directory.announced.remote())

    def _update(self, announced: tuple[Announced, ...]) -> None:
        if self._models.update(announced):
            self.settings = self.settings.model_copy(update={"models": self._models.settings})
            self.max_message_bytes = _longest(self.settings)

    async def _run(self, lease: Lease, submitted: Submitted) -> AsyncGenerator[Serialized, None]:
        """Run a trace that has passed the checks."""
        message, trace, tenant, served, remotes = submitted
        route = Route(served.target, await self._place(lease, served))
        edits = ()
        if trace.edits:
            edits = await self._directory.edits.remote(tenant.name, served.settings.name, list(trace.edits))
        foreign = await self._foreign(remotes, lease, tenant)
        request = request_of(
            message.trace,
            trace,
            served.settings,
            lease.session_id,
            tenant=tenant.name,
            share=self.settings.share,
            job=message.job,
            edits=edits,
            remotes=tuple({*remotes.get("", ()), *remotes.get(lease.session_id, ())}),
        )
        if request.job:
            yield Serialized(await self._ask(lease, "start", request, route, foreign))
            return
        follower = uuid.uuid4().hex
        call = (request, route, foreign, follower)
        async with contextlib.aclosing(self._follow(lease, "run", request.trace_id, follower, *call)) as events:
            async for event in events:
                yield event

    async def _run_in_own(self, submitted: Submitted) -> AsyncGenerator[Serialized, None]:
        """Run a trace in a session that is opened for it.

        If the trace fails as a whole, the session is closed.
        """
        tenant, served = submitted.tenant, submitted.served
        _check_running(served, await self._directory.model_state.remote(served.target))
        lease = await self._open(tenant)
        begun = False
        try:
            async with contextlib.aclosing(self._run(lease, submitted)) as events:
                async for event in events:
                    begun = True
                    yield event
        except Exception:
            await self._close(lease)
            raise
        except BaseException:
            # The client is gone. If the trace has begun, the client knows the session's id and can come back to it.
            if not begun:
                self._directory.close.remote(lease.session_id, tenant.name)
            raise

    async def _place(self, lease: Lease, served: ServedModel) -> str:
        """Return the replica that runs the session's traces."""
        replica: str
        replica, state = await self._directory.place.remote(lease.session_id, served.target)
        _check_running(served, state)
        return replica

    async def _description(self, served: ServedModel) -> model_pb2.ModelDescription:
        if served.description is None:
            _check_running(served, await self._directory.model_state.remote(served.target))
            data = await asyncio.wait_for(served.engine.describe.remote(served.settings), CALL_SECONDS)
            served.description = model_pb2.ModelDescription.FromString(data)
        return served.description

    async def _foreign(self, remotes: admission.Remotes, lease: Lease, tenant: Tenant) -> dict[str, Saved]:
        """Return the saved values of the tenant's other sessions that a trace uses, by blob id."""
        found: dict[str, Saved] = {}
        for session_id in remotes.keys() - {"", lease.session_id}:
            try:
                held = await self._ask(await self._lease(session_id, tenant), "saved", list(remotes[session_id]))
            except (ServiceFailure, ray.exceptions.RayTaskError) as error:
                fact = describe(error)
                if fact.code != pb.ERROR_CODE_NOT_FOUND:
                    raise
                raise not_found(
                    f"a value of another session, {session_id[:80]!r}, is not here (any more): {fact.message}; send what "
                    "x.fetch() gives, or run the trace that saved it again"
                ) from None
            found.update(zip(remotes[session_id], held, strict=True))
        return found

    async def _open(self, tenant: Tenant, kept: bool = False) -> Lease:
        return self._cache(await self._directory.open.remote(tenant.name, kept))

    async def _close(self, lease: Lease) -> None:
        self._leases.pop(lease.session_id, None)
        await self._directory.close.remote(lease.session_id, lease.tenant)

    async def _lease(self, session_id: str, tenant: Tenant) -> Lease:
        lease = self._leases.get(session_id)
        if lease is None or lease.tenant != tenant.name:
            lease = await self._directory.find.remote(session_id, tenant.name)
        if lease is None:
            raise not_found("there is no such session, or it has ended: open a new one")
        return self._cache(lease)

    def _cache(self, lease: Lease) -> Lease:
        self._leases[lease.session_id] = lease
        self._leases.move_to_end(lease.session_id)
        if len(self._leases) > _MAX_CACHED_LEASES:
            self._leases.popitem(last=False)
        return lease

    async def _ask(self, lease: Lease, method: str, *args: Any) -> Any:
        """Call a session; if its actor has died, call the actor that took its place."""
        try:
            try:
                return await lease.actor.ask.remote(lease.session_id, method, *args)
            except ActorDiedError:
                found = await self._recovered(lease)
                if found is None:
                    raise not_found("the session has ended: open a new one") from None
                lease = found
                if method in _NEED_UPLOADS:
                    raise ServiceFailure(unavailable("the session's actor died: submit the trace again")) from None
                return await lease.actor.ask.remote(lease.session_id, method, *args)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ServiceFailure) and error.cause.failure.code == pb.ERROR_CODE_NOT_FOUND:
                self._leases.pop(lease.session_id, None)
            raise

    async def _follow(
        self, lease: Lease, method: str, trace_id: str, follower: str, *args: Any
    ) -> AsyncGenerator[Serialized, None]:
        """Yield the events of a session's streaming method.

        The session is told when the client goes.
        """
        begun = ended = False
        try:
            for again in (True, False):
                try:
                    calls = lease.actor.follow.options(num_returns="streaming")
                    async for ref in calls.remote(lease.session_id, method, *args):
                        event = Serialized(await ref)
                        begun = True
                        yield event
                    break
                except ActorDiedError:
                    found = await self._recovered(lease)
                    if found is None:
                        message = (
                            "the session that ran the trace is gone, and with it what it held; run the trace again"
                        )
                        raise ServiceFailure(unavailable(message, trace_id)) from None
                    lease = found
                    if begun or not again or method in _NEED_UPLOADS:
                        message = "the session's actor died; what had ended is still there: run the trace again"
                        raise ServiceFailure(unavailable(message, trace_id)) from None
            ended = True
        except Exception:
            ended = True
            raise
        finally:
            if not ended:
                # The client is gone. This task is being cancelled, so nothing may be awaited.
                lease.actor.ask.remote(lease.session_id, "leave", trace_id, follower)

    async def _recovered(self, lease: Lease) -> Lease | None:
        """Return the lease of a session whose actor has died, with the actor that took its place.

        None if the lease has ended.
        """
        self._leases.pop(lease.session_id, None)
        found = await self._directory.recover.remote(lease.session_id, lease.tenant, lease.actor)
        return self._cache(found) if found is not None else None

    async def _beat(self) -> None:
        while True:
            try:
                self._update(await self._directory.heartbeat.remote(self._models.lasting, self._session_settings))
            except ray.exceptions.RayActorError:
                self._leases.clear()
                self._directory = directory(self._session_settings)
            except Exception:
                logger.exception("a heartbeat failed")  # the loop must go on: the directory needs heartbeats
            await asyncio.sleep(HEARTBEAT_SECONDS)


def _longest(settings: Settings) -> int:
    return max(model.limits.max_message_bytes for model in settings.models)


def _check_running(served: ServedModel, known: ModelState) -> None:
    name, state = served.settings.name, served.state(known)
    if state == "IDLE":
        served.wake()
        raise ServiceFailure(
            unavailable(f"nobody has used {name} for a while, so that it has no engine: one starts now")
        )
    if state != "RUNNING":
        raise ServiceFailure(unavailable(f"the engine of {name} is {state.lower()}"))
