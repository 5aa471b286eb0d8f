"""A real gRPC server in the test process that speaks the protocol with scripted behaviour."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import interpose
from interpose.contract.errors import FAILURE_METADATA, STATUS_NAMES, ServiceFailure, failure
from interpose.v1 import model_pb2, service_pb2, service_pb2_grpc, trace_pb2, value_pb2
from interpose.wire import views as indexing
from interpose.wire.encoder import Encoder

LAYERS = 3


def description() -> model_pb2.ModelDescription:
    """Describe a small Llama."""
    modules = [("", "LlamaForCausalLM"), ("model", "LlamaModel"), ("model.embed_tokens", "VocabParallelEmbedding")]
    modules.append(("model.layers", "ModuleList"))
    for i in range(LAYERS):
        modules += [(f"model.layers.{i}", "LlamaDecoderLayer"), (f"model.layers.{i}.self_attn", "LlamaAttention")]
        modules += [(f"model.layers.{i}.mlp", "LlamaMLP"), (f"model.layers.{i}.mlp.down_proj", "RowParallelLinear")]
    modules += [("model.norm", "RMSNorm"), ("lm_head", "ParallelLMHead")]
    found = model_pb2.ModelDescription(
        name="tiny-llama",
        class_name="LlamaForCausalLM",
        config_json='{"hidden_size": 64}',
        generation_config_json="null",
        max_model_len=32,
        vocab_size=512,
        sampling_parameters=["max_tokens", "temperature", "top_p", "seed", "stop"],
        layers=LAYERS,
        digest="d1",
    )
    for path, name in modules:
        module = found.modules.add(path=path, class_name=name)
        if name in ("LlamaForCausalLM", "LlamaModel", "LlamaDecoderLayer", "LlamaAttention"):
            module.not_applied = f"{path or 'the model'} holds attention, so it cannot be applied to values"
        if path.endswith("down_proj"):
            module.detail = "in_features=96, out_features=64"
            module.parameters.add(name="weight", shape=[64, 96], dtype=value_pb2.DTYPE_FLOAT32)
    return found


Script = Callable[["Service", trace_pb2.Trace], Iterator[trace_pb2.Event]]


def finish(service: Service, trace: trace_pb2.Trace) -> Iterator[trace_pb2.Event]:
    """The default script: every invoke generates one token."""
    for index in range(len(trace.invokes)):
        yield trace_pb2.Event(
            output=trace_pb2.Output(
                invoke=index, text=" x", token_ids=[7], finished=True, finish_reason="length", prompt_token_ids=[1, 2]
            )
        )


class Service(service_pb2_grpc.InterposeServicer):
    """The scripted service.

    Attributes:
        script: makes the events of a trace between Accepted and Done.
        refusals: errors to raise by the next calls, by method.
        traces: what was submitted.
        blobs: what was uploaded and what can be fetched.
        cancelled: ids of cancelled traces.
        metadata: of the last call.
    """

    def __init__(self) -> None:
        self.hello = service_pb2.HelloReply(
            protocol=1, oldest_protocol=1, server_version="9.9", models=["tiny-llama"],
            limits=service_pb2.Limits(
                max_message_bytes=1 << 20, max_upload_bytes=1 << 30, max_invokes=4, chunk_bytes=1000, inline_bytes=256,
                max_program_bytes=2000,
            ),
        )  # fmt: skip
        self.script: Script = finish
        self.refusals: dict[str, list[Exception]] = {}
        self.traces: list[trace_pb2.Trace] = []
        self.blobs: dict[str, bytes] = {}
        self.cancelled: list[str] = []
        self.metadata: dict[str, str] = {}
        self.sessions: set[str] = set()
        self.fetch_breaks = 0
        self.fetched_from: list[int] = []
        self.edits: dict[str, trace_pb2.Edit] = {}
        self.jobs: dict[str, list[trace_pb2.Event]] = {}
        self.job_failures: dict[str, trace_pb2.Failure] = {}
        self.attach_breaks: list[int] = []
        self.submit_breaks: list[int] = []
        self.seen: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.closed: list[service_pb2.CloseSessionRequest] = []
        self.opened: list[service_pb2.OpenSessionRequest] = []
        self.sent_bytes = 0
        self.adapters: list[str] = []
        self.tokenizer: list[service_pb2.TokenizerChunk] = []
        self._uploads: dict[str, bytearray] = {}
        self._received: dict[str, set[int]] = {}
        self._ids = itertools.count()

    def _begin(self, method: str, context: grpc.ServicerContext) -> None:
        self.metadata = dict(context.invocation_metadata())
        refusals = self.refusals.get(method)
        if refusals:
            self._abort(refusals.pop(0), context)

    def _abort(self, error: Exception, context: grpc.ServicerContext) -> None:
        if isinstance(error, ServiceFailure):
            fact = error.failure
            context.set_trailing_metadata(((FAILURE_METADATA, fact.SerializeToString()),))
            context.abort(grpc.StatusCode[STATUS_NAMES[fact.code]], fact.message)
        context.abort(error.args[0], error.args[1])

    def _check(self, session_id: str, context: grpc.ServicerContext) -> None:
        if session_id not in self.sessions:
            self._abort(ServiceFailure(failure(trace_pb2.ERROR_CODE_NOT_FOUND, "no such session")), context)

    def Hello(self, request, context):
        self._begin("Hello", context)
        return self.hello

    def DescribeModel(self, request, context):
        self._begin("DescribeModel", context)
        if request.model not in ("", "tiny-llama"):
            self._abort(
                ServiceFailure(
                    failure(trace_pb2.ERROR_CODE_NOT_FOUND, f"no model {request.model!r}", suggestions=["tiny-llama"])
                ),
                context,
            )
        found = description()
        found.adapters.extend(self.adapters)
        return found

    def GetTokenizer(self, request, context):
        yield from self.tokenizer

    def OpenSession(self, request, context):
        self._begin("OpenSession", context)
        self.opened.append(request)
        session_id = f"s{next(self._ids)}"
        self.sessions.add(session_id)
        return service_pb2.OpenSessionReply(session_id=session_id, idle_seconds=60)

    def CloseSession(self, request, context):
        self.closed.append(request)
        if not request.keep_jobs or not self.jobs:
            self.sessions.discard(request.session_id)
        return service_pb2.CloseSessionReply()

    def Upload(self, request, context):
        self._check(request.session_id, context)
        self._begin("Upload", context)
        if request.digest in self.blobs:
            return service_pb2.UploadReply(received=request.size)
        data = self._uploads.setdefault(request.digest, bytearray(request.size))
        offsets = self._received.setdefault(request.digest, set())
        data[request.offset : request.offset + len(request.data)] = request.data
        offsets.update(range(request.offset, request.offset + len(request.data)))
        if len(offsets) == request.size and request.size:
            assert request.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
            self.blobs[request.digest] = bytes(data)
        return service_pb2.UploadReply(received=len(offsets))

    def Submit(self, request, context):
        self._check(request.session_id, context)
        self._begin("Submit", context)
        trace = request.trace
        self.traces.append(trace)
        accepted = trace_pb2.Accepted(
            trace_id=trace.id, session_id=request.session_id, model="tiny-llama", invokes=len(trace.invokes)
        )
        for binding in trace.invokes[0].program.reads:
            if binding.value.WhichOneof("kind") == "ref":
                accepted.captured.add(name=binding.name, index=binding.value.ref)
        if request.job:
            self.jobs[trace.id] = [trace_pb2.Event(accepted=accepted)]
            self._run_job(trace)
        yield trace_pb2.Event(accepted=accepted)
        if request.job:
            return
        if self.submit_breaks:
            self.jobs[trace.id] = [trace_pb2.Event(accepted=accepted)]
            self._run_job(trace)
            yield from self.jobs[trace.id][1 : self.submit_breaks.pop(0)]
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone for a moment")
        try:
            yield from self.script(self, trace)
        except (ServiceFailure, ConnectionError) as error:
            self._abort(error, context)
        yield trace_pb2.Event(done=trace_pb2.Done(usage=trace_pb2.Usage(prompt_tokens=2)))

    def _run_job(self, trace):
        events = self.jobs[trace.id]
        try:
            events.extend(self.script(self, trace))
        except ServiceFailure as error:
            self.job_failures[trace.id] = error.failure
        else:
            events.append(trace_pb2.Event(done=trace_pb2.Done(usage=trace_pb2.Usage(prompt_tokens=2))))

    def Attach(self, request, context):
        self._check(request.session_id, context)
        self._begin("Attach", context)
        if request.trace_id not in self.jobs:
            self._abort(ServiceFailure(failure(trace_pb2.ERROR_CODE_NOT_FOUND, "no such trace")), context)
        break_after = self.attach_breaks.pop(0) if self.attach_breaks else -1
        self.seen.append(request.seen)
        for count, event in list(enumerate(self.jobs[request.trace_id]))[request.seen :]:
            if count == break_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone for a moment")
            yield event
            while not self.gate.wait(0.05):
                if not context.is_active():
                    return
        if request.trace_id in self.job_failures:
            self._abort(ServiceFailure(self.job_failures[request.trace_id]), context)

    def DescribeJob(self, request, context):
        self._check(request.session_id, context)
        self._begin("DescribeJob", context)
        return service_pb2.JobStatus(
            session_id=request.session_id, trace_id=request.trace_id, model="tiny-llama", state="JOB_STATE_RUNNING",
            invokes=1, generated_tokens=5, seconds_since_submitted=2.0, seconds_since_started=1.5,
        )  # fmt: skip

    def DescribeSession(self, request, context):
        self._begin("DescribeSession", context)
        self._check(request.session_id, context)
        reply = service_pb2.SessionDescription(session_id=request.session_id, max_stored_bytes=1 << 30)
        for trace_id in self.jobs:
            reply.traces.add(session_id=request.session_id, trace_id=trace_id, state="JOB_STATE_DONE")
        return reply

    def Fetch(self, request, context):
        self._check(request.session_id, context)
        self._begin("Fetch", context)
        self.fetched_from.append(request.offset)
        data = self.blobs[request.blob_id]
        if request.HasField("view"):
            data = indexing.apply(np.frombuffer(data, np.uint8), request.view).tobytes()
        for count, offset in enumerate(range(request.offset, len(data), 1000)):
            if self.fetch_breaks and count == 2:
                self.fetch_breaks -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone for a moment")
            self.sent_bytes += len(data[offset : offset + 1000])
            yield service_pb2.FetchChunk(offset=offset, data=data[offset : offset + 1000])

    def Cancel(self, request, context):
        self.cancelled.append(request.trace_id)
        if request.forget:
            self.jobs.pop(request.trace_id, None)
        return service_pb2.CancelReply(found=True)

    def StoreEdit(self, request, context):
        self._begin("StoreEdit", context)
        self.edits[request.edit.name] = request.edit
        return service_pb2.StoreEditReply()

    def ListEdits(self, request, context):
        self._begin("ListEdits", context)
        reply = service_pb2.ListEditsReply(max_edits=8)
        for name, edit in self.edits.items():
            reply.edits.add(name=name, bytes=edit.ByteSize(), age_seconds=2.0, source=edit.program.source)
        return reply

    def ClearEdits(self, request, context):
        self._begin("ClearEdits", context)
        gone = [name for name in self.edits if request.name in ("", name)]
        for name in gone:
            del self.edits[name]
        return service_pb2.ClearEditsReply(cleared=len(gone))

    def Status(self, request, context):
        self._begin("Status", context)
        return service_pb2.StatusReply(sessions=len(self.sessions), server_version="9.9")

    def saves(self, invoke: int, updates: dict[int, object] | None = None, **names: object) -> trace_pb2.Event:
        """Make a Saves event; large arrays become blobs to fetch."""

        def put(data: memoryview) -> str:
            blob_id = f"blob/{len(self.blobs)}"
            self.blobs[blob_id] = bytes(data)
            return blob_id

        encoder = Encoder(inline_bytes=256, put_blob=put)
        event = trace_pb2.Event()
        event.saves.invoke = invoke
        for name, value in names.items():
            event.saves.names.add(name=name, value=encoder.encode(value))
        for index, value in (updates or {}).items():
            entry = encoder.objects.values[encoder.encode(value).ref]
            event.saves.updates.add(index=index, value=entry)
        event.saves.objects.CopyFrom(encoder.objects)
        return event


@pytest.fixture
def service():
    """The scripted service, listening at `service.address`."""
    server = grpc.server(ThreadPoolExecutor(8))
    service = Service()
    service_pb2_grpc.add_InterposeServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    service.server = server
    server.start()
    yield service
    server.stop(None).wait()


@pytest.fixture
def client(service):
    """A client of it."""
    with interpose.connect(service.address, progress=False) as client:
        yield client


@pytest.fixture
def model(client):
    """Its model."""
    return client.model()


def numbers(size: int) -> np.ndarray:
    """Make an array that tells a wrong chunk from a right one."""
    return np.arange(size, dtype=np.float32)
