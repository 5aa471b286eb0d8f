"""The ingress: the Interpose service and gRPC health, as a Serve deployment.

The ingress checks calls and forwards them to sessions.

Size: each call of the service is a method.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.caller_watch import this_caller
from actors.directory import HEARTBEAT_SECONDS
from actors.failures import unavailable
from actors.find_directory import directory, own_directory
from actors.protocol import Announced, DirectoryStatus, Lease, Route
from actors.telemetry.telemetry import Telemetry
from interpose.contract.errors import ServiceFailure
from interpose.contract.version import PROTOCOL, PYTHON_VERSION, VERSION
from interpose.v1 import model_pb2, service_pb2
from interpose.v1 import trace_pb2 as pb
from serve_app.environment import calls_over_grpc
from serve_app.ingress import replies
from serve_app.ingress.audit import LONG_MESSAGE, edit_line, trace_line
from serve_app.ingress.calls import Serialized, caller, streaming, unary
from serve_app.ingress.chunks import chunks
from serve_app.ingress.health import HealthCalls
from serve_app.ingress.key_calls import KeyCalls
from serve_app.ingress.listening import replica_on_this_machine
from serve_app.ingress.openai_calls import OpenAICalls
from serve_app.ingress.operator_calls import OperatorCalls
from serve_app.ingress.plain_calls import PlainCalls, is_plain
from serve_app.ingress.requests import Submitted, request_of
from serve_app.ingress.sessions import SessionCalls
from serve_app.models import ServedModel, ServedModels
from serve_app.packages import packages
from serve_app.secrecy import keep_to_itself
from serve_app.settings import Settings, Tenant
from serve_app.tenants import admission
from serve_app.tenants.book import KeyBook, Keyring
from serve_app.tenants.tokens import tokens_of

logger = logging.getLogger(__name__)

CALL_SECONDS = 10.0


class IngressDeployment(HealthCalls, KeyCalls, OperatorCalls, OpenAICalls):
    """One replica of the ingress; another replica can find again everything that it keeps.

    Args:
        settings: of the whole service.
        engines: handle of each model's engine deployment, by the model's name.
        book: the tenants and the hashes of their keys.
    """

    def __init__(self, settings: Settings, engines: dict[str, DeploymentHandle], book: KeyBook) -> None:
        super().__init__()
        keep_to_itself()  # the keys of calls pass through this process
        replica_on_this_machine()
        # Sessions find the engines under the application's name, which the operator chooses when deploying it.
        app = serve.get_replica_context().app_name
        self.settings = settings
        self.keys = Keyring(book)
        self.max_message_bytes = _longest(settings)
        self.telemetry = Telemetry("ingress", settings.telemetry)
        self._models = ServedModels(app, settings.models, engines)
        self._session_settings = settings.sessions
        self._sessions = SessionCalls(own_directory(settings.sessions))
        self._plain = PlainCalls(self._sessions, this_caller(), calls_over_grpc())
        self._heart = asyncio.create_task(self._beat())
        self.keys.when_changed(self._tenants_changed)
        self._following = asyncio.create_task(self.keys.follow(self._directory))

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
        served.check_running(await self._sessions.directory.model_state.remote(served.target))
        async for data in served.engine.options(stream=True).tokenizer.remote():
            yield service_pb2.TokenizerChunk.FromString(data)

    @unary(service_pb2.OpenSessionRequest, service_pb2.OpenSessionReply)
    async def OpenSession(
        self, request: service_pb2.OpenSessionRequest, tenant: Tenant
    ) -> service_pb2.OpenSessionReply:
        """Open a session for a client."""
        lease = await self._sessions.open(tenant, request.kept)
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
        await self._sessions.end(request.session_id, tenant.name, request.keep_jobs)
        return service_pb2.CloseSessionReply()

    @unary(service_pb2.UploadRequest, service_pb2.UploadReply)
    async def Upload(self, request: service_pb2.UploadRequest, tenant: Tenant) -> service_pb2.UploadReply:
        """Take one chunk of an upload."""
        admission.check_upload(request, self.settings.models[0].limits)
        lease = await self._sessions.lease(request.session_id, tenant)
        received = await self._sessions.ask(lease, "upload", request.digest, request.size, request.offset, request.data)
        return service_pb2.UploadReply(received=received)

    @streaming(service_pb2.UnparsedSubmit, pb.Event)
    async def Submit(self, request: service_pb2.UnparsedSubmit, tenant: Tenant) -> AsyncGenerator[Serialized, None]:
        """Run a trace, or follow a trace that was submitted before; a job is only started."""
        admission.check_protocol(request.protocol)
        trace = admission.parse(pb.Trace, request.trace, self.max_message_bytes)
        served = await self._model(trace.model)
        model, description = served.settings, await self._description(served)
        if len(request.trace) > LONG_MESSAGE:
            remotes = await asyncio.to_thread(admission.check_trace, trace, model, tenant, description)
        else:
            remotes = admission.check_trace(trace, model, tenant, description)
        submitted = Submitted(request, trace, tenant, served, remotes, caller())
        if request.session_id:
            events = self._run(await self._sessions.lease(request.session_id, tenant), submitted)
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
        lease = await self._sessions.lease(request.session_id, tenant)
        follower = uuid.uuid4().hex
        call = (lease.session_id, request.trace_id, follower, request.seen)
        async with contextlib.aclosing(
            self._sessions.follow(lease, "attach", request.trace_id, follower, *call, bundles=request.bundles)
        ) as events:
            async for event in events:
                yield event

    @unary(service_pb2.DescribeJobRequest, service_pb2.JobStatus)
    async def DescribeJob(self, request: service_pb2.DescribeJobRequest, tenant: Tenant) -> service_pb2.JobStatus:
        """Return the state of a trace."""
        return await self._sessions.ask(await self._sessions.lease(request.session_id, tenant), "job", request.trace_id)

    @unary(service_pb2.DescribeSessionRequest, service_pb2.SessionDescription)
    async def DescribeSession(
        self, request: service_pb2.DescribeSessionRequest, tenant: Tenant
    ) -> service_pb2.SessionDescription:
        """Return what a session holds."""
        lease = await self._sessions.lease(request.session_id, tenant)
        return await self._sessions.ask(lease, "describe")

    @streaming(service_pb2.FetchRequest, service_pb2.FetchChunk)
    async def Fetch(
        self, request: service_pb2.FetchRequest, tenant: Tenant
    ) -> AsyncGenerator[service_pb2.FetchChunk, None]:
        """Send the bytes of a saved value, or of the part that indices select.

        The bytes come straight from this node's object store.
        """
        lease = await self._sessions.lease(request.session_id, tenant)
        [ref] = await self._sessions.ask(lease, "blob_ref", request.blob_id)
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
        lease = await self._sessions.lease(request.session_id, tenant)
        return service_pb2.CancelReply(
            found=await self._sessions.ask(lease, "cancel", request.trace_id, request.forget)
        )

    @unary(service_pb2.StoreEditRequest, service_pb2.StoreEditReply)
    async def StoreEdit(self, request: service_pb2.StoreEditRequest, tenant: Tenant) -> service_pb2.StoreEditReply:
        """Store a standing edit."""
        admission.check_protocol(request.protocol)
        model = (await self._model(request.model)).settings
        await asyncio.to_thread(admission.check_edit, request.edit, model, tenant)
        self._audit(edit_line(request.edit, tenant.name, caller().key, model.name))
        await self._sessions.directory.store_edit.remote(tenant.name, model.name, request.edit)
        return service_pb2.StoreEditReply()

    @unary(service_pb2.ListEditsRequest, service_pb2.ListEditsReply)
    async def ListEdits(self, request: service_pb2.ListEditsRequest, tenant: Tenant) -> service_pb2.ListEditsReply:
        """List the tenant's standing edits."""
        model = (await self._model(request.model)).settings
        return await self._sessions.directory.list_edits.remote(tenant.name, model.name)

    @unary(service_pb2.ClearEditsRequest, service_pb2.ClearEditsReply)
    async def ClearEdits(self, request: service_pb2.ClearEditsRequest, tenant: Tenant) -> service_pb2.ClearEditsReply:
        """Drop standing edits of the tenant."""
        model = (await self._model(request.model)).settings
        cleared = await self._sessions.directory.clear_edits.remote(tenant.name, model.name, request.name)
        return service_pb2.ClearEditsReply(cleared=cleared)

    @unary(service_pb2.ListPackagesRequest, service_pb2.ListPackagesReply)
    async def ListPackages(
        self, request: service_pb2.ListPackagesRequest, tenant: Tenant
    ) -> service_pb2.ListPackagesReply:
        """Return the packages that the tenant's blocks can import."""
        models = [(await self._model(request.model)).settings] if request.model else self.settings.models
        sandboxed = tenant.trust == "none" and any(model.sandbox == "on" for model in models)
        return await asyncio.to_thread(packages, sandboxed)

    @unary(service_pb2.StatusRequest, service_pb2.StatusReply)
    async def Status(self, request: service_pb2.StatusRequest, tenant: Tenant) -> service_pb2.StatusReply:
        """Return the state of the models, the sessions and the caller's own tenant."""
        await self._look()
        status: DirectoryStatus = await self._sessions.directory.status.remote(self._models.targets)
        return replies.status(status, await self._models.described(status, self._description), tenant)

    # Internal

    def _directory(self) -> Any:
        return self._sessions.directory

    def _tenants_changed(self) -> None:
        if self.keys.book is not None:
            self.settings = self.settings.model_copy(update={"tenants": self.keys.book.valid})

    def _audit(self, line: dict[str, Any]) -> None:
        """Write a line of the audit log; without its line, nothing runs."""
        try:
            self.telemetry.audit(line)
        except OSError:
            logger.exception("the audit log cannot be written")
            raise ServiceFailure(unavailable("the service cannot write its audit log, so it runs nothing")) from None

    async def _tell(self) -> None:
        await self._sessions.directory.telemetry.remote(self.settings.telemetry, self.telemetry.take())

    async def _serving(self) -> bool:
        for served in self._models.all:
            if served.state(await self._sessions.directory.model_state.remote(served.target)) in ("RUNNING", "IDLE"):
                return True
        return False

    async def _model(self, name: str) -> ServedModel:
        """Return the model of a client's request; the model may have been deployed a moment ago."""
        if self.settings.model_named(name) is None:
            await self._look()
        return self._models[admission.model_for(self.settings, name).name]

    async def _look(self) -> None:
        """Update the list of models."""
        with contextlib.suppress(ray.exceptions.RayActorError):
            self._update(await self._sessions.directory.announced.remote())

    def _update(self, announced: tuple[Announced, ...]) -> None:
        if self._models.update(announced):
            self.settings = self.settings.model_copy(update={"models": self._models.settings})
            self.max_message_bytes = _longest(self.settings)

    async def _run(self, lease: Lease, submitted: Submitted) -> AsyncGenerator[Serialized, None]:
        """Run a trace that has passed the checks: a line of the audit log, and a span."""
        if self.telemetry.audits:
            self._audit(await trace_line(submitted, lease.session_id))
        tenant, parent = submitted.tenant.name, submitted.caller.traceparent
        span = self.telemetry.spans.begin("ingress", parent, trace=submitted.trace.id, tenant=tenant)
        failed = ""
        try:
            async with contextlib.aclosing(self._events(lease, submitted, span.context)) as events:
                async for event in events:
                    yield event
        except Exception as error:
            failed = type(error).__name__
            raise
        finally:
            span.end(failed, model=submitted.served.settings.name)

    async def _events(self, lease: Lease, submitted: Submitted, traceparent: str) -> AsyncGenerator[Serialized, None]:
        """Start a trace in its session and yield its events; of a job, the first."""
        message, trace, tenant, served, remotes, _ = submitted
        counted = served.settings.autoscaling_config is not None
        route = Route(served.target, await self._place(lease, served), counted)
        edits = ()
        if trace.edits:
            edits = await self._sessions.directory.edits.remote(tenant.name, served.settings.name, list(trace.edits))
        foreign = await self._sessions.foreign(remotes, lease, tenant)
        request = request_of(
            message.trace,
            trace,
            served.settings,
            lease.session_id,
            tenant=tenant.name,
            trusted=tenant.trust != "none",
            share=self.settings.share_of(tenant),
            weight=self.settings.quotas_of(tenant).weight,
            tokens=tokens_of(trace, served.description),
            job=message.job,
            edits=edits,
            remotes=tuple({*remotes.get("", ()), *remotes.get(lease.session_id, ())}),
            traceparent=traceparent,
        )
        if request.job:
            yield Serialized(await self._sessions.ask(lease, "start", request, route, foreign))
            return
        if is_plain(trace, request.size):
            counted = self.settings.quotas_of(tenant).allowance(0).counted
            found = self._plain.run(lease, request, route, counted)
        else:
            follower = uuid.uuid4().hex
            call = (request, route, foreign, follower)
            found = self._sessions.follow(lease, "run", request.trace_id, follower, *call, bundles=message.bundles)
        try:
            async with contextlib.aclosing(found) as events:
                async for event in events:
                    yield event
        except Exception:
            self._sessions.forget_place(lease, served.target)
            raise

    async def _run_in_own(self, submitted: Submitted) -> AsyncGenerator[Serialized, None]:
        """Run a trace in a session that is opened for it.

        If the trace fails as a whole, the session is closed.
        """
        tenant, served = submitted.tenant, submitted.served
        served.check_running(await self._sessions.directory.model_state.remote(served.target))
        lease = await self._sessions.open(tenant)
        begun = False
        try:
            async with contextlib.aclosing(self._run(lease, submitted)) as events:
                async for event in events:
                    begun = True
                    yield event
        except Exception:
            await self._sessions.close(lease)
            raise
        except BaseException:
            # The client is gone. If the trace has begun, the client knows the session's id and can come back to it.
            if not begun:
                self._sessions.directory.close.remote(lease.session_id, tenant.name)
            raise

    async def _place(self, lease: Lease, served: ServedModel) -> str:
        """Return the replica that runs the session's traces."""
        replica, state = await self._sessions.place(lease, served.target)
        served.check_running(state)
        return replica

    async def _description(self, served: ServedModel) -> model_pb2.ModelDescription:
        if served.description is None:
            served.check_running(await self._sessions.directory.model_state.remote(served.target))
            data = await asyncio.wait_for(served.engine.describe.remote(served.settings), CALL_SECONDS)
            served.description = model_pb2.ModelDescription.FromString(data)
        return served.description

    async def _beat(self) -> None:
        while True:
            wait = HEARTBEAT_SECONDS
            try:
                beat = self._sessions.directory.heartbeat
                self._update(await beat.remote(self._models.lasting, self._session_settings, self.settings.allowances))
                await self._tell()
            except ray.exceptions.RayActorError:
                wait = 0.1  # a new directory knows no quotas yet
                self._sessions.replace_directory(directory(self._session_settings))
            except Exception:
                logger.exception("a heartbeat failed")  # the loop must go on: the directory needs heartbeats
            await asyncio.sleep(wait)


def _longest(settings: Settings) -> int:
    return max(model.limits.max_message_bytes for model in settings.models)
