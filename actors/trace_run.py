"""One trace of a session: its engine call, its recording, and the saved values it owns."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping

from ray.exceptions import RayError

from actors.archive import KeptTrace, clock
from actors.failures import FULL, describe, full, unavailable
from actors.increments import Increments
from actors.protocol import Order
from actors.recording import Recording
from actors.saved import Saved, named
from actors.trace_progress import TraceProgress
from actors.variables import Copy, Left, SharedVariables, copies
from interpose.contract.errors import ServiceFailure, failure, with_retry
from interpose.v1 import trace_pb2 as pb

# Seconds to wait for a blob after the engine has named it. A worker hands a blob over at about that time; later it is lost.
ADOPTION_SECONDS = 60.0

EngineStream = Callable[[pb.Trace], AsyncGenerator[pb.Event, None]]

# Takes a number of bytes; returns a refusal if the session has no room for them.
Room = Callable[[int], pb.Failure | None]

# Takes a trace's outcome and its variables; returns an awaitable that ends when both outlive the session actor.
Keep = Callable[[KeptTrace, Mapping[str, Copy]], Awaitable[None]]


def _without_means(order: Order) -> Order:
    """Return the part of an order that identifies a trace which has run.

    Values of other traces and edits are left out, so that they are not kept with the trace.
    """
    return dataclasses.replace(order, foreign=(), edits=())


class TraceRun:
    """Runs a trace once and keeps its events and values.

    Args:
        order: the order to run the trace.
        key: the trace's name inside the service. Clients choose trace ids; keys never collide.
        room: asks the session whether it has room for a saved value.
        keep: makes the trace's outcome outlive the session actor.
        remotes: values of earlier traces that this trace uses, by blob id; they stay as long as the trace runs.
        variables: the session's variables.
        before: traces that must end before this trace begins, because they share a variable with it.

    Attributes:
        recording: the trace's events, for any number of readers.
        blobs: the trace's saved values by blob id.
        again: values of earlier traces that the trace saved unchanged, by blob id.
        followers: ids of the calls that read the events now; a trace without a follower is cancelled.
        read: whether a client has read the events to their end.
        fetched: blob ids of the saved values that a client has received completely.
        announced: of a job, an awaitable that ends when the job can be found again even if the session actor dies.
    """

    def __init__(
        self,
        order: Order,
        key: str,
        room: Room,
        keep: Keep,
        remotes: Mapping[str, Saved] | None = None,
        variables: SharedVariables | None = None,
        before: Iterable[TraceRun] = (),
    ) -> None:
        self.id = order.trace_id
        self.key = key
        self.order = order
        self.progress = TraceProgress(pb.Accepted.FromString(order.accepted))
        self.remotes = dict(remotes or {})
        self._room = room
        self._keep = keep
        self.recording = Recording()
        self.blobs: dict[str, Saved] = {}
        self.again: dict[str, Saved] = {}
        self._variables = variables or SharedVariables()
        self._before = tuple(before)
        self._left: tuple[pb.Saves, list[Left]] | None = None  # the variables that a trace leaves that has ended well
        self.followers: set[str] = set()
        self.read = False
        self.fetched: set[str] = set()
        self.saved_bytes = 0
        self.abandoned = False
        self.announced: Awaitable[None] | None = None
        self._settling = False
        self._said: Awaitable[None] | None = None
        self._named: set[str] = set()
        self._logs_expected = 0
        self._logs = 0
        self._increments = Increments()
        self._streamed = False
        self._adopted = asyncio.Condition()
        self._refusal: pb.Failure | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def restored(cls, kept: KeptTrace, room: Room, keep: Keep, variables: SharedVariables) -> TraceRun:
        """Return an ended trace of a session whose actor is dead.

        A trace that had not ended has failed.
        """
        run = cls(kept.order, kept.key, room, keep, variables=variables)
        run.progress = kept.progress
        run.progress.move(kept.clock - clock())
        if run.ended_at is None:
            run.progress.end(kept.failure)
        run.blobs, run.again = dict(kept.blobs), dict(kept.again)
        run.saved_bytes = sum(saved.size for saved in run.blobs.values())
        run.recording = Recording(kept.events)
        run.recording.end(kept.failure)
        return run

    @property
    def running(self) -> bool:
        """Whether more events may come."""
        return not self.recording.ended

    @property
    def ended_at(self) -> float | None:
        """When the trace ended, on the monotonic clock; None while it runs."""
        return self.progress.ended_at

    @property
    def repeatable(self) -> bool:
        """Whether submitting the trace again may run it again.

        This holds for a trace that ended without a result of its own.
        """
        if self.running or self.recording.failure is None:
            return False
        return self.abandoned or self.recording.failure.code == pb.ERROR_CODE_UNAVAILABLE

    @property
    def collected(self) -> bool:
        """Whether the trace has ended and its client has all its values, as far as is known here."""
        return not self.running and self.read and {*self.blobs, *self.again} <= self.fetched

    @property
    def stored_bytes(self) -> int:
        """Bytes that the trace keeps: saved values, the recording, and the order."""
        submitted = len(self.order.trace) + sum(map(len, self.order.edits))
        return self.saved_bytes + self.recording.size + submitted

    def start(self, engine: EngineStream) -> None:
        """Begin the trace; its events go to the recording."""
        self.recording.append(pb.Event(accepted=pb.Accepted.FromString(self.order.accepted)))
        if self.order.job:
            lost = unavailable("the session's actor died while the trace ran: run it again", self.id)
            self.announced = self._keep(self._kept(lost), {})
        # A separate context: otherwise Ray counts these calls as a part of the client's call, and cancels them with it.
        self._task = asyncio.create_task(self._run(engine), name=f"trace {self.key}", context=contextvars.Context())

    async def cancel(self) -> None:
        """End the trace now; its engine requests are aborted.

        Does nothing to a trace that has ended or is about to end.
        """
        if self._task is not None and not self._task.done():
            if not self._settling:
                self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            # A task that is cancelled before its first step runs none of its code.
            await self._end(self._cancelled())
            if self._said is not None:
                with contextlib.suppress(RayError):
                    await self._said  # a later message to forget the trace must not overtake this one

    async def adopt(self, blob_id: str, saved: Saved) -> None:
        """Take one saved value."""
        if not self.running or self._settling or blob_id in self.blobs:
            return  # a value of a failed invoke, or a repeated message
        refusal = self._too_much(saved.size) or self._room(saved.size)
        if refusal is not None:
            refusal.trace_id = self.id
            self._refusal = refusal
        else:
            self.saved_bytes += saved.size
            self.blobs[blob_id] = saved
        async with self._adopted:
            self._adopted.notify_all()

    async def no_room(self) -> None:
        """Note that neither the object store nor the disk behind it has room for a saved value."""
        self._refusal = self._refusal or full(self.id)
        async with self._adopted:
            self._adopted.notify_all()

    async def log(self, invoke: int, text: str) -> None:
        """Record a text that a block printed."""
        self.recording.append(pb.Event(log=pb.Log(invoke=invoke, text=text)))
        self._logs += 1
        async with self._adopted:
            self._adopted.notify_all()

    async def increment(self, increment: pb.Increment) -> None:
        """Take an increment that a block of a streamed trace saved.

        It goes on with the output of its step.
        """
        self._increments.add(increment)
        async with self._adopted:
            self._adopted.notify_all()

    async def blob(self, blob_id: str) -> Saved | None:
        """Return a saved value once it is here; None if it will never come."""
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
            for unnamed in self.blobs.keys() - self._named:  # values of failed invokes
                self.saved_bytes -= self.blobs.pop(unnamed).size
            self._settling = True
            usage.saved_bytes = self.saved_bytes
            await self._settle(pb.Event(done=pb.Done(usage=usage)))
        except asyncio.CancelledError:
            ended = self._cancelled()
        except Exception as error:
            ended = describe(error, self.id)
        finally:
            await self._end(ended)

    async def _settle(self, done: pb.Event) -> None:
        """Make the trace's outcome outlive the session actor, then record that the trace is done."""
        variables: dict[str, Copy] = {}
        if self._left is not None:
            saves, left = self._left
            mine, earlier = named(saves)
            blobs = {name: self.blobs[name] for name in mine} | {name: self.again[name] for name in earlier}
            variables = copies(saves.objects, left, blobs)
        if self.order.keep or self.blobs or self.again or variables:
            self.progress.end(None)
            await self._keep(self._kept(None, done), variables)
        self._variables.keep(variables)
        self.recording.append(done)

    def _kept(self, failure: pb.Failure | None, *more: pb.Event) -> KeptTrace:
        """Return the part of the trace that outlives the session actor: its events, and `more`."""
        events = (*self.recording.events, *(event.SerializeToString() for event in more))
        return KeptTrace(
            _without_means(self.order),
            self.key,
            self.progress,
            clock(),
            events,
            failure,
            dict(self.blobs),
            dict(self.again),
        )

    def _cancelled(self) -> pb.Failure:
        return failure(pb.ERROR_CODE_CANCELLED, "the trace was cancelled", trace_id=self.id, invoke=-1)

    async def _end(self, ended: pb.Failure | None) -> None:
        """End the recording and wake all waiting calls. Idempotent."""
        if self.running:
            self.progress.end(ended)
            self.remotes.clear()
            self.order = _without_means(self.order)
            self._before = ()
            self.recording.end(ended)
            if ended is not None and self.order.keep:
                with contextlib.suppress(*FULL):
                    self._said = self._keep(self._kept(ended), {})  # a follower of the trace does not wait for this
        async with self._adopted:
            self._adopted.notify_all()

    async def _forward(self, engine: EngineStream) -> pb.Usage:
        trace = pb.Trace.FromString(self.order.trace)
        trace.id = self.key
        self._streamed = trace.stream
        trace.applied.extend(pb.Edit.FromString(data) for data in self.order.edits)
        own = len(trace.scope.values)
        if trace.variables:
            for run in self._before:
                await run.wait()
            self.remotes.update(self._variables.lend(trace))
        shared: pb.Event | None = None
        failed = False
        async with contextlib.aclosing(engine(trace)) as events:
            async for event in events:
                self.progress.observe(event)
                kind = event.WhichOneof("kind")
                if kind == "failed":
                    failed = True
                    event.failed.trace_id = self.id
                    # A lost engine has failed every invoke. The trace as a whole may be tried again.
                    with_retry(event.failed)
                    if event.failed.code == pb.ERROR_CODE_UNAVAILABLE:
                        raise ServiceFailure(event.failed)
                elif kind == "output":
                    self._logs_expected += event.output.logs
                    if self._streamed:
                        await self._before_output(event.output)
                elif kind == "increment":
                    await self._before_increment(event.increment)
                    self._name(event.increment)
                elif kind == "saves":
                    if event.saves.invoke < 0 and trace.variables:
                        shared = event  # held back until all invokes have ended
                        continue
                    self._name(event.saves)
                self.recording.append(event)
                if self._refusal is not None:
                    raise ServiceFailure(self._refusal)
        if shared is not None:
            self._left = (shared.saves, self._variables.settle(trace, shared.saves, own, failed))
            self._name(shared.saves)
            self.recording.append(shared)
        return self.progress.usage()

    async def wait(self) -> None:
        """Wait until the trace has ended, well or not."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _name(self, message: pb.Saves | pb.Increment) -> None:
        """Note which saved values must come from the workers.

        Values of earlier traces are here already.
        """
        own, earlier = named(message)
        self._named |= own
        self.again.update((name, self.remotes[name]) for name in earlier)

    async def _before_output(self, output: pb.Output) -> None:
        """Record what the steps of an output's tokens saved, once it is here."""
        self._increments.generated(output)
        if output.finished:
            return  # the last increment came from the engine before this output
        await self._wait_for(lambda: self._increments.complete(output.invoke), "what a block saved")
        self._record(self._increments.take(output.invoke))

    async def _before_increment(self, last: pb.Increment) -> None:
        """Record the increments that come before the last increment of an invoke."""
        await self._wait_for(lambda: self._increments.complete_before(last), "what a block saved")
        self._record(self._increments.take_all(last.invoke))

    def _record(self, increments: list[pb.Increment]) -> None:
        for increment in increments:
            self._name(increment)
            self.recording.append(pb.Event(increment=increment))

    async def _wait_for_workers(self) -> None:
        await self._wait_for(lambda: self._named <= self.blobs.keys(), "a saved value")
        await self._wait_for(lambda: self._logs >= self._logs_expected, "what the blocks printed")

    async def _wait_for(self, here: Callable[[], bool], what: str) -> None:
        """Wait until a message that the engine announced has come from the workers."""
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
