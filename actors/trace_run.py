"""One trace of a session: its engine call, its recording, and the saved values it owns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import ray

from actors.failures import describe, unavailable
from actors.increments import Increments
from actors.protocol import Order
from actors.recording import Recording
from actors.trace_progress import TraceProgress
from interpose.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from interpose.v1 import value_pb2

# A worker hands over a blob about when its engine names it; a blob that is still missing after this is lost.
ADOPTION_SECONDS = 60.0

EngineStream = Callable[[pb.Trace], AsyncGenerator[pb.Event, None]]

# Is asked for room for so many bytes; gives a refusal where there is none.
Room = Callable[[int], pb.Failure | None]


class TraceRun:
    """Runs a trace once and keeps what came of it.

    Args:
        order: what to run.
        key: the trace's name inside the service; clients choose trace ids, keys do not collide.
        room: asks the session whether it has room for a saved value.
        remotes: references to values of earlier traces that this one uses, by blob id; they stay as long as it does.

    Attributes:
        recording: its events, for any number of readers.
        blobs: references to saved values by blob id; this process owns them.
        shared: the canonical copy of the variables that its invokes share: as sent at first, as last updated later.
        followers: who reads its events now; a trace that nobody follows is cancelled.
    """

    def __init__(self, order: Order, key: str, room: Room, remotes: Mapping[str, ray.ObjectRef] | None = None) -> None:
        self.id = order.trace_id
        self.key = key
        self.order = order
        self.progress = TraceProgress(pb.Accepted.FromString(order.accepted))
        self.remotes = dict(remotes or {})
        self._room = room
        self.recording = Recording()
        self.blobs: dict[str, ray.ObjectRef] = {}
        self.shared = pb.Saves(invoke=-1)
        self.followers: set[str] = set()
        self.saved_bytes = 0
        self.abandoned = False
        self._named: set[str] = set()
        self._logs_expected = 0
        self._logs = 0
        self._increments = Increments()
        self._streamed = False
        self._adopted = asyncio.Condition()
        self._refusal: pb.Failure | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether more events may come."""
        return not self.recording.ended

    @property
    def ended_at(self) -> float | None:
        """When it ended, on the monotonic clock; None while it runs."""
        return self.progress.ended_at

    @property
    def repeatable(self) -> bool:
        """Whether submitting it again may run it again: it never came to a result of its own."""
        if self.running or self.recording.failure is None:
            return False
        return self.abandoned or self.recording.failure.code == pb.ERROR_CODE_UNAVAILABLE

    @property
    def stored_bytes(self) -> int:
        """What it keeps: saved values, its recording, and what it was submitted as."""
        return self.saved_bytes + self.recording.size + len(self.order.trace)

    def start(self, engine: EngineStream) -> None:
        """Begin; events go to the recording."""
        self.recording.append(pb.Event(accepted=pb.Accepted.FromString(self.order.accepted)))
        self._task = asyncio.create_task(self._run(engine), name=f"trace {self.key}")

    async def cancel(self) -> None:
        """End it now; its engine requests are aborted. Does nothing to a trace that has ended."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def adopt(self, blob_id: str, data: Any) -> None:
        """Take over the bytes of one saved value: they then outlive the worker that made them."""
        if not self.running:
            return
        refusal = self._too_much(data.nbytes) or self._room(data.nbytes)
        if refusal is not None:
            refusal.trace_id = self.id
            self._refusal = refusal
        else:
            self.saved_bytes += data.nbytes
            # The copy into the object store takes long enough for other traces to notice.
            self.blobs[blob_id] = await asyncio.to_thread(ray.put, data)
        async with self._adopted:
            self._adopted.notify_all()

    async def log(self, invoke: int, text: str) -> None:
        """Something a block printed."""
        self.recording.append(pb.Event(log=pb.Log(invoke=invoke, text=text)))
        self._logs += 1
        async with self._adopted:
            self._adopted.notify_all()

    async def increment(self, increment: pb.Increment) -> None:
        """Something that a block of a streamed trace saved; it goes on with the output of its step."""
        self._increments.add(increment)
        async with self._adopted:
            self._adopted.notify_all()

    async def blob(self, blob_id: str) -> ray.ObjectRef | None:
        """Return the reference to a saved value, once it is here; None if it will never be."""
        async with self._adopted:
            while blob_id not in self.blobs and self.running and self._refusal is None:
                await self._adopted.wait()
        return self.blobs.get(blob_id)

    async def _run(self, engine: EngineStream) -> None:
        ended: pb.Failure | None = None
        try:
            usage = await self._forward(engine)
            await self._wait_for_workers()
            if self._refusal is not None:
                raise ServiceFailure(self._refusal)
            usage.saved_bytes = self.saved_bytes
            self.recording.append(pb.Event(done=pb.Done(usage=usage)))
        except asyncio.CancelledError:
            ended = failure(pb.ERROR_CODE_CANCELLED, "the trace was cancelled", trace_id=self.id, invoke=-1)
        except Exception as error:
            ended = describe(error, self.id)
        finally:
            self.progress.end(ended)
            self.remotes.clear()
            self.recording.end(ended)
            async with self._adopted:
                self._adopted.notify_all()

    async def _forward(self, engine: EngineStream) -> pb.Usage:
        trace = pb.Trace.FromString(self.order.trace)
        trace.id = self.key
        self._streamed = trace.stream
        trace.applied.extend(pb.Edit.FromString(data) for data in self.order.edits)
        self.shared.objects.CopyFrom(trace.scope)
        self.shared.names.extend(trace.shared)
        async with contextlib.aclosing(engine(trace)) as events:
            async for event in events:
                self.progress.observe(event)
                kind = event.WhichOneof("kind")
                if kind == "failed":
                    event.failed.trace_id = self.id
                    # An engine that is gone has failed every invoke; the trace as a whole may be tried again.
                    if event.failed.code == pb.ERROR_CODE_UNAVAILABLE:
                        raise ServiceFailure(event.failed)
                elif kind == "output":
                    self._logs_expected += event.output.logs
                    if self._streamed:
                        await self._before_output(event.output)
                elif kind == "increment":
                    await self._before_increment(event.increment)
                    self._named.update(_blob_ids(event.increment))
                elif kind == "saves":
                    self._named.update(_blob_ids(event.saves))
                    if event.saves.invoke < 0:
                        self.shared = event.saves
                self.recording.append(event)
                if self._refusal is not None:
                    raise ServiceFailure(self._refusal)
        return self.progress.usage()

    async def _before_output(self, output: pb.Output) -> None:
        """Record what the tokens of an output's steps saved, once it is here."""
        self._increments.generated(output)
        if output.finished:
            return  # the last increment came before it, from the engine
        await self._wait_for(lambda: self._increments.complete(output.invoke), "what a block saved")
        self._record(self._increments.take(output.invoke))

    async def _before_increment(self, last: pb.Increment) -> None:
        """Record what came before the last increment of an invoke."""
        await self._wait_for(lambda: self._increments.complete_before(last), "what a block saved")
        self._record(self._increments.take_all(last.invoke))

    def _record(self, increments: list[pb.Increment]) -> None:
        for increment in increments:
            self._named.update(_blob_ids(increment))
            self.recording.append(pb.Event(increment=increment))

    async def _wait_for_workers(self) -> None:
        await self._wait_for(lambda: self._named <= self.blobs.keys(), "a saved value")
        await self._wait_for(lambda: self._logs >= self._logs_expected, "what the blocks printed")

    async def _wait_for(self, here: Callable[[], bool], what: str) -> None:
        """Wait until something that the engine announced has come from the workers."""
        async with self._adopted:
            try:
                await asyncio.wait_for(
                    self._adopted.wait_for(lambda: here() or self._refusal is not None), ADOPTION_SECONDS
                )
            except TimeoutError:
                text = f"{what} did not arrive from the worker that ran the block"
                raise ServiceFailure(unavailable(text, self.id)) from None

    def _too_much(self, size: int) -> pb.Failure | None:
        limit = self.order.max_saved_bytes
        if self.saved_bytes + size <= limit:
            return None
        return failure(
            pb.ERROR_CODE_QUOTA_EXCEEDED,
            f"the trace saves more than it may: {self.saved_bytes + size} bytes, the limit is {limit}. Save fewer "
            "values, or parts of them",
        )


def _blob_ids(saves: pb.Saves | pb.Increment) -> Iterator[str]:
    todo: list[value_pb2.Value] = [*saves.objects.values]
    todo.extend(binding.value for binding in saves.names)
    if isinstance(saves, pb.Saves):
        todo.extend(update.value for update in saves.updates)
    else:
        todo.extend(value_pb2.Value(tensor=patch.tensor) for patch in saves.patches if patch.HasField("tensor"))
    while todo:
        value = todo.pop()
        kind = value.WhichOneof("kind")
        if kind == "tensor":
            if value.tensor.WhichOneof("payload") == "blob":
                yield value.tensor.blob.id
        elif kind in ("list", "tuple", "set", "frozen_set", "size"):
            todo.extend(getattr(value, kind).items)
        elif kind in ("dict", "record"):
            mapping = value.dict if kind == "dict" else value.record.fields
            todo.extend(mapping.keys)
            todo.extend(mapping.values)
