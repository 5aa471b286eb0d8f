"""A trace, its budget and its receiver, for tests of what leaves a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from executor.saves.collect import Limits, collect
from executor.saves.outbox import LocalOutbox
from executor.saves.registry import SaveRegistry
from executor.saves.reuse import EarlierTensors
from executor.saves.stream import SaveStream
from interpose.results.assembly import Assembly, blobs_of
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Blob
from interpose.wire.decoder import Decoder
from interpose.wire.resolver import Resolver

T = TypeVar("T")


@dataclass
class Trace:
    """A trace of one invoke, without an engine.

    Attributes:
        uploads: what its session holds, by blob id.
    """

    id: str = "t"
    session: str = "s"
    expected: int = 1
    remote: bool = False
    stacks: bool = True
    of_session: bool = False
    blame: bytes = b""
    saved_bytes: int = 0
    registry: SaveRegistry = field(default_factory=SaveRegistry)
    streamed: set[int] = field(default_factory=set)
    uploads: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.earlier = EarlierTensors(lambda blob: self.uploads[blob.id])

    def captured(self) -> dict[int, int]:
        return {}


class Unbounded:
    """A budget that bounds nothing."""

    step_seconds = 1.0

    def run(self, do: Callable[[], T], used: float, trace: bytes) -> tuple[T, float]:
        return do(), 0.0


@dataclass
class Sent:
    """What one invoke sent at its end.

    Attributes:
        saves: the message.
        blobs: its blobs, by id.
    """

    saves: pb.Saves
    blobs: dict[str, bytes]

    @property
    def kinds(self) -> list[str | None]:
        """The kinds of the entries of the table."""
        return [value.WhichOneof("kind") for value in self.saves.objects.values]

    def names(self, library: str = "auto") -> dict[str, Any]:
        """The names as a notebook gets them, from the serialized message."""
        saves = pb.Saves.FromString(self.saves.SerializeToString())
        decoder = Decoder(saves.objects, get_blob=self._get, library=library)
        return {binding.name: decoder.decode(binding.value) for binding in saves.names}

    def _get(self, blob: Blob) -> Any:
        return np.frombuffer(self.blobs[blob.id], np.uint8).copy()


def sent(trace: Trace, *, inline_bytes: int = 1024, limit: int = 1 << 40, invoke: int = 0, **names: Any) -> Sent:
    """Save names at the end of an invoke."""
    blobs: dict[str, bytes] = {}
    for value in names.values():
        trace.registry.mark(value, value) if value not in trace.registry else None
    limits = Limits(inline_bytes, limit)
    [event] = collect(trace, invoke, names, {}, limits, lambda key, data: blobs.update({key: bytes(data)}))
    assert event.WhichOneof("kind") == "saves", event
    return Sent(event.saves, blobs)


class Streamed:
    """A streamed invoke and the notebook that reads it.

    Attributes:
        names: the names in the notebook.
        increments: what was sent, in order.
    """

    def __init__(self, trace: Trace, *names: str, inline_bytes: int = 1024) -> None:
        self._trace = trace
        self._outbox = LocalOutbox()
        program = pb.Program(writes=names)
        limits = Limits(inline_bytes, 1 << 40)
        self.stream = SaveStream(trace, program, 0, limits, Unbounded(), self._outbox)
        self._assembly = Assembly({}, Resolver())
        self._steps = 0
        self.increments: list[pb.Increment] = []
        self.names = self._assembly.names

    def step(self, **namespace: Any) -> pb.Increment:
        """Send what is new after a step, and read it."""
        self._steps += 1
        assert self.stream.step(namespace, self._steps, last=False), self.stream.failure
        return self._read(pb.Event.FromString(self._outbox.increments[-1][1]).increment)

    def end(self, **namespace: Any) -> pb.Increment:
        """Send what is new at the end, and read it."""
        return self._read(self.stream.end(namespace, self._steps).increment)

    def _read(self, increment: pb.Increment) -> pb.Increment:
        self.increments.append(increment)
        for blob in blobs_of(increment):
            self._assembly.buffers[blob.id] = np.frombuffer(self._outbox.blobs.pop(blob.id), np.uint8).copy()
        self._assembly.add(increment)
        return increment
