"""The traces of a batch for an engine in the same process, from their text to their values."""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from interpose.capture.analysis import block_reads_writes
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Value
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import Encoder
from interpose.wire.request import TraceRequest
from interpose.wire.resolver import Resolver

AT_ONCE = 32  # blocks that one call ends, as in `executor.engine.rpc`
INLINE_BYTES = 16 << 10  # larger constants of a block are uploaded, as a notebook does it

_NAMES = {"model": Value(module=""), "tracer": Value(tracer=True), "torch": Value(python_module="torch")}
_ids = itertools.count()


class TracedBlock:
    """A block that is ready to run any number of times.

    Its notebook and its engine prepare a block in the same way.

    Args:
        source: the text of the block.
        captured: values that the block reads besides `model`, `tracer` and `torch`, by name.
        uploads: takes the bytes of large values, by digest.
    """

    def __init__(self, source: str, captured: Mapping[str, Any], uploads: MutableMapping[str, bytes]) -> None:
        reads, writes = block_reads_writes(ast.parse(source).body)
        self._program = pb.Program(source=source, filename="<benchmark>", first_line=1, writes=writes)
        encoder = Encoder(inline_bytes=INLINE_BYTES, put_blob=lambda data: _upload(data, uploads))
        for name in reads:
            if name in captured:
                self._program.reads.append(Binding(name=name, value=encoder.encode(captured[name])))
            elif name in _NAMES:
                self._program.reads.append(Binding(name=name, value=_NAMES[name]))
        self._objects = encoder.objects
        self._codes: dict[str, Any] | None = None

    def batches(self, count: int, joined: bool = False, trusted: bool = True) -> list[TracedTrace]:
        """Return the traces of a batch.

        Args:
            count: requests of the batch.
            joined: whether one trace has all requests as its invokes; otherwise each request is a trace of its own.
            trusted: whether blocks may run in the worker's own process.
        """
        return [self._trace(invokes, trusted) for invokes in ([count] if joined else [1] * count)]

    def request(self, prompt: list[int], sampling: Mapping[str, Any]) -> TraceRequest:
        """Return a trace of one request as an engine gets it.

        Args:
            prompt: token ids.
            sampling: the request's sampling parameters.
        """
        encoder = Encoder(inline_bytes=INLINE_BYTES, put_blob=lambda data: "")
        message = self._message([pb.Invoke(program=self._program, prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)))])
        message.sampling.extend(Binding(name=name, value=encoder.encode(value)) for name, value in sampling.items())
        return TraceRequest(message.SerializeToString(), key=message.id)

    def _message(self, invokes: Iterable[pb.Invoke]) -> pb.Trace:
        return pb.Trace(id=f"benchmark-{next(_ids)}", scope=self._objects, invokes=invokes, stacks=True)

    def _trace(self, invokes: int, trusted: bool) -> TracedTrace:
        from executor.core.programs import made, units_of

        message = self._message(pb.Invoke(program=self._program) for _ in range(invokes))
        if self._codes is None:
            self._codes = {unit.key: made(unit, 1 << 30) for unit in units_of(message)}
        return TracedTrace(message, self._codes, trusted)


class TracedTrace:
    """One trace of a batch.

    Args:
        message: the trace.
        codes: what its texts compile to.
        trusted: whether its blocks may run in the worker's own process.

    Attributes:
        invokes: how many requests it has.
    """

    def __init__(self, message: pb.Trace, codes: dict[str, Any], trusted: bool) -> None:
        from executor.core.request import shipped

        self._id = message.id
        self._trusted = trusted
        request = TraceRequest(message.SerializeToString(), key=message.id, trusted=trusted)
        self._shipment = shipped(request, codes)
        self._events: list[bytes] = []
        self.invokes = len(message.invokes)

    def open(self, worker: Any) -> None:
        """Give the worker what the requests of the trace have in common, if there are several.

        Raises:
            RuntimeError: the worker did not take it.
        """
        if self.invokes > 1 and (reason := worker.interpose_open(self._shipment)):
            raise RuntimeError(reason)

    def extra_args(self, invoke: int) -> dict[str, Any]:
        """Return the `SamplingParams.extra_args` of one request."""
        from executor.core.request import InvokeRequest

        shipment = self._shipment if self.invokes == 1 else None
        return InvokeRequest(self._id, invoke, trusted=self._trusted, shipment=shipment).to_args()

    def finish(self, worker: Any, invoke: int, output: Any) -> None:
        """End the block of a finished request.

        Args:
            worker: the engine's only worker.
            invoke: index of the request in the trace.
            output: vLLM's output of the request.

        Raises:
            RuntimeError: the block failed.
        """
        finish_all(worker, [(self, invoke, output)])

    def call(self, invoke: int, output: Any) -> tuple[str, int, dict[str, Any]]:
        """Return the arguments with which a worker ends the block of a finished request.

        Args:
            invoke, output: as of `finish`.
        """
        completion = output.outputs[0]
        result = Result(
            completion.text, list(completion.token_ids), completion.finish_reason or "", list(output.prompt_token_ids)
        )
        return self._id, invoke, result.to_plain()

    def take(self, ending: Any) -> None:
        """Take what a worker answered of the block of one request.

        Raises:
            RuntimeError: the block failed.
        """
        state, events, _ = ending
        if state != "done":
            failures = [event.failed for event in map(pb.Event.FromString, events) if event.HasField("failed")]
            raise RuntimeError(f"a benchmark's block ended as {state}: {failures}")
        self._events += events

    def drop(self, worker: Any) -> None:
        """Give the trace up."""
        worker.interpose_drop(self._id)

    def values(self, blobs: MutableMapping[str, memoryview]) -> Iterator[Any]:
        """Return each value that the blocks saved, as a notebook gets it.

        Args:
            blobs: the worker's large saved values, by id. The values that are read leave it.
        """
        return values_of(self._events, blobs)


def finish_all(worker: Any, some: Sequence[tuple[TracedTrace, int, Any]]) -> None:
    """End the blocks of finished requests by few calls, as an engine does.

    Args:
        worker: the engine's only worker.
        some: of each request the trace, the index in the trace, and vLLM's output.

    Raises:
        RuntimeError: a block failed.
    """
    for at in range(0, len(some), AT_ONCE):
        part = some[at : at + AT_ONCE]
        endings = worker.interpose_finish_all([trace.call(invoke, output) for trace, invoke, output in part])
        for (trace, _, _), ending in zip(part, endings, strict=True):
            trace.take(ending)


def values_of(events: Iterable[bytes], blobs: MutableMapping[str, memoryview]) -> Iterator[Any]:
    """Yield each value that a trace saved, as a notebook gets it.

    Args:
        events: the serialized events of the trace.
        blobs: large saved values, by id. The values that are read leave it.

    Raises:
        RuntimeError: a block failed.
    """
    for event in map(pb.Event.FromString, events):
        if event.WhichOneof("kind") == "failed":
            raise RuntimeError(f"a benchmark's block failed: {event.failed}")
        if event.WhichOneof("kind") == "saves":
            decoder = Decoder(event.saves.objects, get_blob=lambda blob: blobs.pop(blob.id), resolver=Resolver())
            yield from (decoder.decode(binding.value) for binding in event.saves.names)


def _upload(data: memoryview, uploads: MutableMapping[str, bytes]) -> str:
    raw = bytes(data)
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    uploads[digest] = raw
    return digest
