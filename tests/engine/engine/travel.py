"""The way of a trace in one process: ingress, session, engine and worker are real, Ray and gRPC are not there.

What travels between two of them is pickled, or encoded as vLLM encodes it, and measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from actors.caller_watch import CallerWatch
from actors.protocol import Lease, ModelState, Target, Terms
from actors.session_host import SessionHost
from actors.telemetry.options import Options
from actors.telemetry.telemetry import Telemetry
from executor.cluster.verdicts import Verdicts
from executor.engine.compiler import Compiler
from executor.engine.engine import TraceEngine
from executor.engine.openai_serving import OpenAIServing
from executor.engine.startup import Started
from executor.model.lora import Adapters
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from serve_app.engine import EngineDeployment
from serve_app.engine_telemetry import EngineTelemetry
from serve_app.ingress.deployment import IngressDeployment
from serve_app.ingress.openai_errors import BODY_KEY
from serve_app.ingress.plain_calls import PlainCalls
from serve_app.ingress.sessions import SessionCalls
from serve_app.models import ServedModels
from serve_app.settings import settings_from
from serve_app.tenants.book import Keyring, book_of
from serve_app.tenants.seats import Seats
from tests.engine.harness import LocalEngine, watch
from tests.unit.actors.local_directory import LocalDirectory

TRACES = (pb.Trace, service_pb2.SubmitRequest)
EVENTS = (pb.Event, pb.Accepted, pb.Increment)
# The part of the service that a file belongs to; what is not listed works for its caller.
PARTS = {
    "/serve_app/engine": "engine",
    "/serve_app/": "ingress",
    "/actors/": "session",
    "/executor/engine/": "engine",
    "/executor/interleave/": "worker",
    "/executor/plugin/": "worker",
    "/executor/saves/": "worker",
}


class Counts:
    """What was counted on the way of a trace.

    Attributes:
        calls: how often each part serialized or parsed a trace or an event, by (what, part, "serialized" or "parsed").
        sent: bytes on each hop, by (from, to).
        messages: the number of messages on each hop.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.sent: Counter[tuple[str, str]] = Counter()
        self.messages: Counter[tuple[str, str]] = Counter()

    def crossed(self, start: str, end: str, size: int) -> None:
        """Count a message of `size` bytes."""
        self.sent[start, end] += size
        self.messages[start, end] += 1

    def pickled(self, start: str, end: str, value: Any) -> Any:
        """Return what arrives of a value that is sent with pickle."""
        data = pickle.dumps(value, protocol=5)
        self.crossed(start, end, len(data))
        return pickle.loads(data)

    @contextlib.contextmanager
    def counting(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Count serializations and parses of traces and events."""
        with patch.context() as patched:
            for what, kinds in (("trace", TRACES), ("event", EVENTS)):
                for kind in kinds:
                    patched.setattr(kind, "SerializeToString", self._serializing(what, kind.SerializeToString))
                    patched.setattr(kind, "FromString", staticmethod(self._parsing(what, kind.FromString)))
            yield

    def _serializing(self, what: str, method: Any) -> Callable[..., bytes]:
        def serialize(message: Any, **options: Any) -> bytes:
            self.calls[what, _part(), "serialized"] += 1
            data: bytes = method(message, **options)
            return data

        return serialize

    def _parsing(self, what: str, method: Any) -> Callable[[bytes], Any]:
        def parse(data: bytes) -> Any:
            self.calls[what, _part(), "parsed"] += 1
            return method(data)

        return parse


def _part() -> str:
    """Return the part of the service that called."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == __file__:
            return "client" if frame.f_code.co_name == "submit" else "ingress"
        for path, part in PARTS.items():
            if path in name:
                return part
        frame = frame.f_back  # type: ignore[assignment]
    raise AssertionError("a part of the service that is not listed")


class LocalLLM:
    """vLLM's AsyncLLM over an engine core in this process.

    Args:
        engine: the engine.
        counts: takes what crosses from the engine's front to its core, and to the workers.
        patch: undoes what is put between them.
    """

    def __init__(self, engine: LocalEngine, counts: Counts, patch: pytest.MonkeyPatch) -> None:
        self._engine = engine.llm.llm_engine
        self.vllm_config = self._engine.vllm_config
        self.errored = False
        self._counts = counts
        self._encoder = MsgpackEncoder()
        self._outputs: dict[str, asyncio.Queue[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None
        core, executor = self._engine.engine_core, self._engine.model_executor
        add, call = core.add_request, executor.collective_rpc

        def add_encoded(request: EngineCoreRequest) -> None:
            frames = self._encoder.encode(request)
            counts.crossed("engine", "core", sum(len(memoryview(frame).cast("B")) for frame in frames))
            add(MsgpackDecoder(EngineCoreRequest).decode(frames))

        def call_pickled(
            method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None, **options: Any
        ) -> Any:
            method, args, kwargs = counts.pickled("core", "worker", (method, args, kwargs))
            return call(method, timeout, args, kwargs, **options)

        watch(patch, core, "add_request", add_encoded)
        watch(patch, executor, "collective_rpc", call_pickled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def get_tokenizer(self) -> Any:
        return self._engine.get_tokenizer()

    async def check_health(self) -> None:
        pass

    def check_admission(self, count: int) -> None:
        pass

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        frames = self._encoder.encode((0, 0, "collective_rpc", (method, timeout, args, None)))
        self._counts.crossed("engine", "core", sum(len(memoryview(frame).cast("B")) for frame in frames))
        _, _, _, (method, timeout, args, _) = MsgpackDecoder().decode(frames)
        answers = self._engine.engine_core.collective_rpc(method, timeout, tuple(args))
        return list(self._counts.pickled("worker", "engine", answers))

    async def generate(
        self, prompt: Any, params: Any, request_id: str, lora_request: Any, **options: Any
    ) -> AsyncIterator[Any]:
        queue = self._outputs[request_id] = asyncio.Queue()
        self._engine.add_request(request_id, prompt, params, lora_request=lora_request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._steps())
        while True:
            output = await queue.get()
            yield output
            if output.finished:
                del self._outputs[request_id]
                return

    async def _steps(self) -> None:
        await asyncio.sleep(0)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                self._outputs[output.request_id].put_nowait(output)
            await asyncio.sleep(0)


class _Responses:
    """Stands in for a streaming answer of Serve."""

    def __init__(self, items: AsyncGenerator[Any, None]) -> None:
        self._items = items
        self._over = False

    def __aiter__(self) -> _Responses:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._items)

    def cancel(self) -> None:
        self._over = True


class _Call:
    """Stands in for Serve's context of a call.

    Attributes:
        failure: why the call failed, if it did.
    """

    failure: pb.Failure | None = None

    def invocation_metadata(self) -> list[Any]:
        return []

    def set_code(self, code: Any) -> None:
        pass

    def set_details(self, details: str) -> None:
        pass

    def set_trailing_metadata(self, metadata: list[tuple[str, bytes]]) -> None:
        [(_, data)] = metadata
        self.failure = pb.Failure.FromString(data)


class _NoServing:
    """Stands in for the endpoint's classes until a test asks for them."""


async def _never() -> Any:
    await asyncio.get_running_loop().create_future()


class _Replica(EngineDeployment):
    """The engine deployment without Serve."""

    def __init__(self, engine: TraceEngine) -> None:
        self._replica = "r"
        self._engine = engine
        self._callers = CallerWatch()
        self._traces = {}
        self._seats = Seats(8, 8)
        self._telemetry = EngineTelemetry(Options())

    def __del__(self) -> None:  # type: ignore[override]
        pass


class _Ingress(IngressDeployment):
    """The ingress without Serve.

    Args:
        actor: stands in for the session actor.
        description: of the only model.
        settings: of the service.
    """

    def __init__(self, actor: Any, description: Any, settings: Any) -> None:
        self.settings = settings
        self.keys = Keyring(book_of(settings.tenants, ""))
        self.telemetry = Telemetry("ingress", settings.telemetry)
        self.max_message_bytes = settings.models[0].limits.max_message_bytes
        self._models = ServedModels("app", settings.models, {settings.models[0].name: None})  # type: ignore[dict-item]
        self._models[settings.models[0].name].description = description

        async def place(session_id: str, target: Target) -> tuple[str, ModelState]:
            return "r", ModelState("RUNNING", 1, 0, 0)

        async def find(session_id: str, tenant: str) -> Lease:
            return Lease(session_id, tenant, actor)

        async def opened(tenant: str, kept: bool) -> Lease:
            return await find("s", tenant)

        async def closed(*args: Any) -> None:
            pass

        async def announced() -> tuple[Any, ...]:
            return ()

        ways = {"place": place, "find": find, "open": opened, "close": closed, "announced": announced}
        directory: Any = SimpleNamespace(**{name: SimpleNamespace(remote=way) for name, way in ways.items()})
        self._sessions = SessionCalls(directory)
        self._plain = PlainCalls(self._sessions, "serve/ingress")


class _Actor:
    """Stands in for a session actor's handle: every call and every item is pickled."""

    def __init__(self, host: SessionHost, counts: Counts) -> None:
        self._host = host
        self._counts = counts
        self.ask = SimpleNamespace(remote=self._ask)
        self.follow_all = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._follow_all))

    def _ask(self, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._host.ask(*self._counts.pickled("ingress", "session", args)))

    async def _follow_all(self, *args: Any) -> AsyncIterator[Any]:
        async for item in self._host.follow_all(*self._counts.pickled("ingress", "session", args)):
            made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            made.set_result(self._counts.pickled("session", "ingress", item))
            yield made


class Way:
    """A service in this process.

    Args:
        engine: runs the traces.
        patch: undoes what is put between the parts.

    Attributes:
        counts: what was counted of the traces so far.
        engine: the engine as its replica has it.
        replica: the replica that holds the engine.
    """

    def __init__(self, engine: LocalEngine, patch: pytest.MonkeyPatch) -> None:
        self.counts = Counts()
        self._engine = engine
        self._patch = patch
        settings = settings_from({"models": [{"model": "folder/m"}]})
        llm: Any = LocalLLM(engine, self.counts, patch)
        patch.setenv("INTERPOSE_ENGINE_VERDICTS", "")  # is set by `Verdicts`, and goes with the patch
        self._compiler = Compiler(settings.models[0].limits.max_program_nodes)
        self._verdicts = Verdicts()
        self.engine = TraceEngine(
            Started(
                llm, engine.describe(), Adapters({}), self._compiler, self._verdicts, _NoServing(), engine.row_values
            )
        )
        self._llm = llm
        self.replica = _Replica(self.engine)
        self._host = SessionHost("actor", LocalDirectory())
        handle = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._run))
        watch(patch, self._host._engines, "_handle", lambda target: handle)
        self._sending: list[asyncio.Task[None]] = []
        watch(patch, engine.worker.interpose_outbox, "increment", self._send)
        self._ingress = _Ingress(_Actor(self._host, self.counts), engine.describe(), settings)
        watch(patch, self._ingress._plain._engines, "_handle", lambda target: handle)

    def _send(self, session: str, key: str, data: bytes) -> None:
        """Send an increment from the worker to its session."""
        data = self.counts.pickled("worker", "session", data)
        self._sending.append(asyncio.ensure_future(self._host.increment(key, data)))

    def _run(self, *args: Any) -> _Responses:
        return _Responses(self._items(*self.counts.pickled("session", "engine", args)))

    async def _items(self, *args: Any) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(self.replica.run_all(*args)) as items:
            async for item in items:
                yield self.counts.pickled("engine", "session", item)

    async def submit(self, trace: pb.Trace) -> list[pb.Event]:
        """Run a trace as a client does; return its events."""
        call = _Call()
        events = []
        await self._host.open("s", False, Terms(600.0, 1 << 30, 900.0))
        with self.counts.counting(self._patch):
            request = service_pb2.SubmitRequest(protocol=1, session_id="s", trace=trace, bundles=True)
            data = request.SerializeToString()
            self.counts.crossed("client", "ingress", len(data))
            async for reply in self._replies(data, call):
                event = pb.Event.FromString(reply)
                events.extend(event.bundle.events if event.HasField("bundle") else (event,))
        await self._host.close("s")
        assert call.failure is None, call.failure
        return events

    async def http(
        self, method: str, path: str, body: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> tuple[int, dict[str, str], bytes]:
        """Send an HTTP request to the endpoint; return status, headers and body of the answer."""
        if isinstance(self.engine.serving, _NoServing):
            self.engine.serving = await OpenAIServing.start(self._llm, "m", {}, Adapters({}), 16)
        await self._host.open("s", False, Terms(600.0, 1 << 30, 900.0))
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "query_string": b""}
        answer = await self._ingress(Request(scope | {BODY_KEY: body}, _never))
        await answer(scope, _never, send)
        await self._host.close("s")
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], found, b"".join(one.get("body", b"") for one in sent[1:])

    async def refusal(self, message: Any) -> pb.Failure:
        """Send a message as a client does; return why its call failed."""
        call = _Call()
        await self._host.open("s", False, Terms(600.0, 1 << 30, 900.0))
        async for _ in self._replies(message.SerializeToString(), call):
            pass
        await self._host.close("s")
        assert call.failure is not None
        return call.failure

    async def _replies(self, data: bytes, call: _Call) -> AsyncIterator[bytes]:
        """Yield what Serve sends to the client."""
        async for reply in self._ingress.Submit(data, call):
            sent = reply.SerializeToString()
            self.counts.crossed("ingress", "client", len(sent))
            yield sent

    def close(self) -> None:
        """End the compiler's process."""
        self._compiler.close()
        self._verdicts.close()
