"""Sends a service messages that no client makes, beside a client that must not notice.

`python -m benchmarks fuzz`. One tenant's messages go to all calls: real messages with fields changed, and garbage. Each answer is
a reply or a failure with a type. Another tenant runs one trace all the time and compares its values. At the end the engine is the
one of the beginning, no session and no stored byte is left, and no process has more memory, descriptors or children than
before, within a bound. What breaks one of these rules is a fault, and ends the run with an error.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import psutil
from google.protobuf.message import Message

import interpose
from benchmarks.fuzz_messages import Messages, parts_of
from benchmarks.growth import Growth
from benchmarks.processes import title
from benchmarks.served import Service
from interpose.contract.errors import FAILURE_METADATA, InterposeError
from interpose.v1 import keys_pb2, operator_pb2, service_pb2, service_pb2_grpc, value_pb2
from interpose.v1 import trace_pb2 as pb

MESSAGES = 100_000
SEED = 20
THREADS = 8
CALL_SECONDS = 4.0
# A client that gives up does not learn which session was opened for it.
OPEN_SECONDS = 60.0
# How often each call is chosen; a call that is not named counts 4.
WEIGHTS = {"Submit": 12, "Attach": 2, "GetTokenizer": 1, "OpenSession": 2, "Hello": 1, "Status": 1}
# The calls of operators are in the other service. They are refused, because the tenant is none.
SERVICES = (service_pb2.DESCRIPTOR.services_by_name["Interpose"], operator_pb2.DESCRIPTOR.services_by_name["Operator"])
METHODS = {method.name: method for service in SERVICES for method in service.methods}
KEYS = {"neighbour": "the-neighbours-own-key", "stranger": "the-strangers-own-key"}
PROMPT = "The Eiffel Tower is in"
# Failures that are the client's own: it gives a call up after some seconds.
_OWN = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_FAULTS = 20


class Found(RuntimeError):
    """A fault of the service."""


@dataclass
class Tally:
    """What a run has seen.

    Attributes:
        answers: answers by method and outcome.
        faults: what breaks the rules, in words.
        canaries: traces of the neighbour that were right.
        say: takes what breaks the rules at once.
    """

    answers: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)
    canaries: int = 0
    say: Callable[[str], object] = lambda text: None

    def fault(self, text: str) -> None:
        """Note a fault."""
        if len(self.faults) < _FAULTS:
            self.faults.append(text[:2000])
            self.say(f"a fault: {text[:2000]}")


class Fuzz:
    """Fuzzes one service.

    Args:
        address: of the service.
        stranger: the key of the tenant that sends the messages; "" without keys.
        neighbour: the key of the tenant that must not notice.
        model: the name of the served model.
        seed: of the messages.
    """

    def __init__(self, address: str, stranger: str, neighbour: str, model: str, seed: int) -> None:
        self.tally = Tally()
        self._address, self._key, self._model = address, stranger, model
        self._neighbour = neighbour
        self._metadata = (("x-api-key", stranger),) if stranger else ()
        self._sessions: set[str] = set()
        self._lock = threading.Lock()
        self._messages = Messages(self._real(), seed)
        self._stop = threading.Event()
        self._names = [name for name in sorted(METHODS) for _ in range(_weight(name))]

    def run(self, messages: int, seconds: float = 1e9, say: Callable[[str], object] = lambda text: None) -> Tally:
        """Send messages until there are enough or the time is over; return what was seen.

        Raises:
            Found: a rule was broken.
        """
        tally = self.send(messages, seconds, say)
        if tally.faults:
            raise Found("\n".join(tally.faults))
        return tally

    def send(self, messages: int, seconds: float = 1e9, say: Callable[[str], object] = lambda text: None) -> Tally:
        """Send messages until there are enough or the time is over; return what was seen."""
        self.tally.say = say
        canary = threading.Thread(target=self._canary)
        canary.start()
        deadline = time.monotonic() + seconds
        chosen = itertools.count()
        threads = [threading.Thread(target=self._send, args=(chosen, messages, deadline, say)) for _ in range(THREADS)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._stop.set()
            canary.join()
        self._tidy()
        if time.monotonic() < deadline and sum(self.tally.answers.values()) < messages:
            self.tally.fault("a thread that sends messages has ended before its time")
        return self.tally

    def left(self) -> dict[str, int]:
        """Return what the stranger has left: sessions, running traces and stored bytes."""
        with grpc.insecure_channel(self._address) as channel:
            stub = service_pb2_grpc.InterposeStub(channel)
            status = stub.Status(service_pb2.StatusRequest(), metadata=self._metadata, timeout=20)
        return {
            "sessions": sum(one.sessions for one in status.tenants),
            "running": sum(one.traces_running for one in status.tenants),
            "stored bytes": sum(one.stored_bytes for one in status.tenants),
        }

    def _real(self) -> dict[str, list[Message]]:
        """Return real messages of each method, as a client sends them."""
        seen: dict[str, list[Message]] = collections.defaultdict(list)
        with interpose.connect(self._address, self._key, progress=False) as client:
            stub = client._transport._stub
            for name in service_pb2.DESCRIPTOR.services_by_name["Interpose"].methods_by_name:
                setattr(stub, name, _recorded(getattr(stub, name), seen[name]))
            model = client.model(self._model)
            _some_traces(client, model)
        sessions = [one.session_id for one in seen["Submit"] if one.session_id]  # type: ignore[attr-defined]
        session = sessions[0] if sessions else "0" * 32
        digest = "sha256:" + "0" * 64
        made: dict[str, Message] = {
            "Upload": service_pb2.UploadRequest(session_id=session, digest=digest, size=70, data=bytes(70)),
            "Attach": service_pb2.AttachRequest(session_id=session, trace_id="a", bundles=True),
            "Fetch": service_pb2.FetchRequest(session_id=session, blob_id="a/0", length=3),
            "Cancel": service_pb2.CancelRequest(session_id=session, trace_id="a", forget=True),
            "DescribeJob": service_pb2.DescribeJobRequest(session_id=session, trace_id="a"),
            "DescribeSession": service_pb2.DescribeSessionRequest(session_id=session),
            "OpenSession": service_pb2.OpenSessionRequest(kept=True),
            "CloseSession": service_pb2.CloseSessionRequest(session_id=session, keep_jobs=True),
            "ListKeys": keys_pb2.ListKeysRequest(),
            "RevokeKey": keys_pb2.RevokeKeyRequest(tenant="neighbour", label="nothing"),
            "ListTraces": operator_pb2.ListTracesRequest(tenant="neighbour", model=self._model, most=7),
            "CancelTrace": operator_pb2.CancelTraceRequest(key="neighbour/a"),
            "Drain": operator_pb2.DrainRequest(model=self._model),
            "GetUsage": operator_pb2.GetUsageRequest(tenant="neighbour"),
        }
        for name, message in made.items():
            seen[name].append(message)
        for name, method in METHODS.items():
            if not seen[name]:
                seen[name].append(_class_of(method.input_type.name)())
        return dict(seen)

    def _send(self, chosen: Any, messages: int, deadline: float, say: Callable[[str], object]) -> None:
        with grpc.insecure_channel(
            self._address,
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)],
        ) as channel:
            while (number := next(chosen)) < messages and time.monotonic() < deadline and not self._stop.is_set():
                if number and number % 5000 == 0:
                    say(f"{number} messages, {self.tally.canaries} traces beside them, {len(self.tally.faults)} faults")
                with self._lock:
                    name = self._messages._random.choice(self._names)
                    data = self._messages.message(name)
                self._call(channel, name, data)
                if len(self.tally.faults) >= _FAULTS:
                    self._stop.set()

    def _call(self, channel: grpc.Channel, name: str, data: bytes) -> None:
        method = METHODS[name]
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        seconds = OPEN_SECONDS if name == "OpenSession" else CALL_SECONDS
        outcome = "OK"
        try:
            call = kind(f"/{method.containing_service.full_name}/{name}")(
                data, metadata=self._metadata, timeout=seconds
            )
            for reply in call if method.server_streaming else [call]:
                self._replied(name, method, reply)
        except grpc.RpcError as error:
            outcome = self._failed(name, data, error)
        except Exception as error:
            outcome = "no message"
            self.tally.fault(f"{name} {data[:200].hex()}: the reply is none: {error!r}")
        with self._lock:
            self.tally.answers[name, outcome] += 1

    def _replied(self, name: str, method: Any, data: bytes) -> None:
        reply = _class_of(method.output_type.name).FromString(data)
        if isinstance(reply, service_pb2.OpenSessionReply):
            self._opened(reply.session_id)
        if isinstance(reply, pb.Event):
            for event in reply.bundle.events if reply.HasField("bundle") else [reply]:
                if event.HasField("accepted"):
                    self._opened(event.accepted.session_id)
                if event.HasField("failed"):
                    self._typed(name, data, event.failed)
                for part in parts_of(event.saves) if event.HasField("saves") else ():
                    if isinstance(part, value_pb2.Blob):
                        with self._lock:
                            self._messages.learn(part.id)

    def _opened(self, session: str) -> None:
        with self._lock:
            if session:
                self._sessions.add(session)
                self._messages.live(session)

    def _failed(self, name: str, data: bytes, error: grpc.RpcError) -> str:
        """Return the outcome of a failed call; a failure without a type is a fault."""
        code = error.code()  # type: ignore[attr-defined]
        for key, value in error.trailing_metadata() or ():  # type: ignore[attr-defined]
            if key == FAILURE_METADATA:
                fact = pb.Failure.FromString(value)
                self._typed(name, data, fact)
                return str(pb.ErrorCode.Name(fact.code))
        if code not in _OWN:
            details = error.details()  # type: ignore[attr-defined]
            self.tally.fault(f"{name} {data[:200].hex()}: a failure without a type: {code} {details}")
        return f"{code.name} of the client"

    def _typed(self, name: str, data: bytes, fact: pb.Failure) -> None:
        text = f"{name} {data[:4000].hex()}: {pb.ErrorCode.Name(fact.code)} {fact.message}"
        if fact.code in (pb.ERROR_CODE_ENGINE, pb.ERROR_CODE_UNSPECIFIED, pb.ERROR_CODE_UNAVAILABLE):
            self.tally.fault(text)
        elif "Traceback" in fact.message or not fact.message:
            self.tally.fault(f"{text}: no message for a client")
        elif fact.code == pb.ERROR_CODE_QUOTA_EXCEEDED and fact.retry_after <= 0:
            self.tally.fault(f"{text}: no time to wait")

    def _canary(self) -> None:
        """Run one trace again and again, and compare its values with the first."""
        expected: np.ndarray | None = None
        while not self._stop.is_set():
            try:
                with interpose.connect(self._address, self._neighbour, progress=False) as client:
                    model = client.model(self._model)
                    while not self._stop.is_set():
                        with model.trace(PROMPT, max_tokens=2, ignore_eos=True, temperature=0.0):
                            hidden = model.blocks[1].resid_post.float().save()
                        value = np.asarray(hidden)
                        expected = value if expected is None else expected
                        if not np.allclose(value, expected, atol=1e-4):
                            self.tally.fault(f"the neighbour's value changed by {np.abs(value - expected).max()}")
                        self.tally.canaries += 1
            except InterposeError as error:
                self.tally.fault(f"the neighbour's trace failed: {type(error).__name__} {error}")
                time.sleep(0.5)

    def _tidy(self) -> None:
        """Close what the messages have opened."""
        with grpc.insecure_channel(self._address) as channel:
            stub = service_pb2_grpc.InterposeStub(channel)
            for session in sorted(self._sessions):
                request = service_pb2.CloseSessionRequest(session_id=session)
                stub.CloseSession(request, metadata=self._metadata, timeout=30)
            for model in stub.Hello(service_pb2.HelloRequest(), metadata=self._metadata, timeout=30).models:
                edits = service_pb2.ClearEditsRequest(model=model)
                stub.ClearEdits(edits, metadata=self._metadata, timeout=30)


def _some_traces(client: interpose.Client, model: Any) -> None:
    """Send what a client sends: traces, edits, uploads, jobs."""
    import torch

    vector = torch.arange(128.0)
    large = torch.zeros(20_000)
    table = {"a": [1, 2.5, None, True, "text", b"bytes"], "b": (slice(1, 2), {3, 4}, 1 + 2j)}
    with client.session():
        with model.trace(PROMPT, max_tokens=2, temperature=0.0):
            first = model.blocks[1].resid_post.save()
        with model.trace(max_tokens=2) as tracer:
            with tracer.invoke(PROMPT):
                model.blocks[0].resid_post[:] += vector.sum() * 0 + large.sum()
                kept = [table["a"][0]].save()
            with tracer.invoke([1, 2, 3]):
                seen = model.logits.output.save()
        with model.trace([1, 2, 3], max_tokens=3, ignore_eos=True) as tracer:
            steps = [].save()
            for _step in tracer.iter[:]:
                steps.append(model.logits.output.argmax())
    with model.edit("calm"):
        model.blocks[0].resid_post[:] *= 1.0
    with model.trace(PROMPT, edits=["calm"], max_tokens=1):
        model.blocks[0].resid_post.save()
    model.edits()
    model.clear_edits()
    with model.trace(PROMPT, max_tokens=1, blocking=False) as tracer:
        model.blocks[0].resid_post.save()
    tracer.job.status()
    tracer.job.forget()
    client.status()
    del first, kept, seen


def _recorded(call: Any, into: list[Message]) -> Any:
    def call_and_note(request: Message, **options: Any) -> Any:
        into.append(request)
        return call(request, **options)

    return call_and_note


def _weight(name: str) -> int:
    """Return how often a call is chosen."""
    return 1 if METHODS[name].containing_service.name == "Operator" else WEIGHTS.get(name, 4)


def _class_of(name: str) -> Any:
    for module in (service_pb2, pb, value_pb2, keys_pb2, operator_pb2):
        if hasattr(module, name):
            return getattr(module, name)
    from interpose.v1 import model_pb2

    return getattr(model_pb2, name)


def run(
    *, messages: int | None = None, seed: int | None = None, seconds: float | None = None
) -> dict[str, dict[str, float]]:
    """Fuzz a service of its own; return answers by method and outcome.

    Args:
        messages: how many.
        seed: of the messages.
        seconds: after which the run ends, however many messages were sent.

    Raises:
        Found: a rule was broken.
    """
    tenants = [{"name": name, "api_key": key} for name, key in KEYS.items()]
    service = Service(
        1,
        1,
        {"enforce_eager": True, "max_model_len": 128},
        limits={"step_seconds": 3.0, "block_memory_bytes": 256 << 20},
        sessions={"retention_seconds": 10.0, "stored_bytes": 64 << 20, "wait_seconds": 1.0},
        tenants=tenants,
    )
    try:
        address = service.address()
        fuzz = Fuzz(address, KEYS["stranger"], KEYS["neighbour"], "llama", SEED if seed is None else seed)
        fuzz_warm = Fuzz(address, KEYS["stranger"], KEYS["neighbour"], "llama", 1)
        fuzz_warm.run(1000, seconds=15.0)
        engines = _engines(service.process.children(recursive=True))
        growth = Growth(service.process)
        began = time.monotonic()
        tally = fuzz.send(messages or MESSAGES, seconds or 1e9, lambda text: print(f"  {text}", flush=True))
        took = time.monotonic() - began
        after = service.process.children(recursive=True)
        faults = tally.faults + _left(fuzz)
        if _engines(after) != engines:
            faults.append("the engine is another one than at the beginning")
        grown, more = growth.settled()
        if faults := faults + more:
            raise Found("\n".join([*faults, f"{sum(tally.answers.values())} messages in {took:.0f} s", str(grown)]))
    finally:
        service.close()
    results: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for (name, outcome), count in sorted(tally.answers.items()):
        results[name][outcome] = count
    total = sum(tally.answers.values())
    results["all"] = {"messages": total, "seconds": took, "faults": 0, "traces beside them": tally.canaries}
    return dict(results) | grown


def _engines(processes: list[psutil.Process]) -> set[int]:
    found = set()
    for process in processes:
        try:
            if "LazyWorkerActor" in title(process):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def _left(fuzz: Fuzz, seconds: float = 60.0) -> list[str]:
    """Return what the messages have left behind that does not go in time."""
    deadline = time.monotonic() + seconds
    while any((left := fuzz.left()).values()):
        if time.monotonic() > deadline:
            return [f"left after {seconds:g} s: {left}"]
        time.sleep(0.5)
    return []
