"""One trace of a session: its engine call, its event log, and the saved values it owns.

Size: one class, whose methods are the ways in which a trace goes on and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping

from ray.exceptions import RayError

from actors.archive import KeptTrace, clock
from actors.arrivals import Arrivals
from actors.dues import Dues
from actors.event_log import EventLog
from actors.failures import FULL, describe, full, unavailable
from actors.increments import Arrived
from actors.protocol import Work
from actors.readers import Readers
from actors.saved import Saved, named
from actors.trace_progress import TraceProgress
from actors.variables import Copy, Left, SharedVariables, copies
from interpose.contract.errors import ServiceFailure, failure, with_retry
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import apart, kind_of
from interpose.wire.request import TraceRequest

# Takes a trace; yields its serialized events, alone or in bundles.
EngineStream = Callable[[TraceRequest], AsyncGenerator[bytes, None]]

# Takes a trace's outcome and its variables; returns an awaitable that ends when both outlive the session actor.
Keep = Callable[[KeptTrace, Mapping[str, Copy]], Awaitable[None]]


# Takes a trace that has ended.
Ended = Callable[["TraceRun"], None]

# The shared values that a trace saved, and which of them are session variables.
LeftVariables = tuple[pb.Saves, list[Left]]

# Kinds of events that the session looks into.
_READ = frozenset({"failed", "output", "increment", "saves", "accounting"})


class TraceRun:
    """Runs a trace once and keeps its events and values.

    Args:
        request: the trace.
        dues: asks for the trace and for the bytes that it saves, where the tenant has quotas.
        keep: makes the trace's outcome outlive the session actor.
        remotes: values of earlier traces that this trace uses, by blob id; they stay as long as the trace runs.
        variables: the session's variables.

    Attributes:
        request: as given; without its standing edits once the trace has ended.
        progress: how far the trace is.
        remotes: as given; empty once the trace has ended.
        event_log: the trace's events, for any number of readers.
        arrivals: what the workers bring: saved values, printed text, increments.
        again: values of earlier traces that the trace saved unchanged, by blob id.
        readers: the calls that read the trace.
        announced: of a job, an awaitable that ends when the job can be found again even if the session actor dies.
    """

    def __init__(
        self,
        request: TraceRequest,
        dues: Dues,
        keep: Keep,
        remotes: Mapping[str, Saved] | None = None,
        variables: SharedVariables | None = None,
    ) -> None:
        self.request = request
        self.progress = TraceProgress(pb.Event.FromString(request.accepted).accepted)
        self.remotes = dict(remotes or {})
        self._dues = dues
        self._keep = keep
        self.event_log = EventLog()
        self.arrivals = Arrivals(request.trace_id)
        self.again: dict[str, Saved] = {}
        self._variables = variables or SharedVariables()
        self.readers = Readers()
        self.announced: Awaitable[None] | None = None
        self._settling = False
        self._said: Awaitable[None] | None = None
        self._ended: Ended | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def restored(cls, kept: KeptTrace, dues: Dues, keep: Keep, variables: SharedVariables) -> TraceRun:
        """Return an ended trace of a session whose actor is dead.

        A trace that had not ended has failed.
        """
        run = cls(kept.request, dues, keep, variables=variables)
        run.progress = kept.progress
        run.progress.move(kept.clock - clock())
        if run.ended_at is None:
            run.progress.end(kept.failure)
        run.arrivals.restore(kept.blobs)
        run.again = dict(kept.again)
        run.event_log = EventLog(kept.events)
        run.event_log.end(kept.failure)
        return run

    @property
    def id(self) -> str:
        """The trace's id, as the client chose it."""
        return self.request.trace_id

    @property
    def key(self) -> str:
        """The trace's name inside the service."""
        return self.request.key

    @property
    def running(self) -> bool:
        """Whether more events may come."""
        return not self.event_log.ended

    @property
    def ended_at(self) -> float | None:
        """When the trace ended, on the monotonic clock; None while it runs."""
        return self.progress.ended_at

    @property
    def repeatable(self) -> bool:
        """Whether submitting the trace again may run it again.

        This holds for a trace that ended without a result of its own.
        """
        if self.running or self.event_log.failure is None:
            return False
        return self.readers.abandoned or self.event_log.failure.code == pb.ERROR_CODE_UNAVAILABLE

    @property
    def collected(self) -> bool:
        """Whether the trace has ended and its client has all its values, as far as is known here."""
        return not self.running and self.readers.read and {*self.arrivals.blobs, *self.again} <= self.readers.fetched

    @property
    def stored_bytes(self) -> int:
        """Bytes that the trace keeps: saved values, the event log, and the trace itself."""
        submitted = len(self.request.trace) + sum(map(len, self.request.edits))
        return self.arrivals.saved_bytes + self.event_log.size + submitted

    @property
    def refused(self) -> bool:
        """Whether the trace has ended without being accepted."""
        return not self.running and not self.event_log.size

    @property
    def work(self) -> Work:
        """What the trace has done so far."""
        return Work(1, self.progress.tokens, self.arrivals.saved_bytes)

    def start(self, engine: EngineStream, before: Iterable[TraceRun] = (), ended: Ended | None = None) -> None:
        """Begin the trace; its events go to the event log.

        Args:
            engine: runs the trace.
            before: traces that must end before this trace begins, because they share a variable with it.
            ended: called when the trace has ended.
        """
        self._ended = ended
        counted = self._dues.counted
        if not counted:
            self._accept()
        # A separate context: otherwise Ray counts these calls as a part of the client's call, and cancels them with it.
        self._task = asyncio.create_task(
            self._run(engine, tuple(before), counted), name=f"trace {self.key}", context=contextvars.Context()
        )

    def _accept(self) -> None:
        self.event_log.append(self.request.accepted)
        if self.request.job:
            lost = unavailable("the session's actor died while the trace ran: run it again", self.id)
            self.announced = self._keep(self._kept(lost), {})

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
        if not self.running or self._settling or blob_id in self.arrivals.blobs:
            return  # a value of a failed invoke, or a repeated message
        try:
            self.arrivals.check_size(saved.size, self.request.max_saved_bytes)
            async with self._dues.room(saved.size, saved=True):
                if self.running and not self._settling and blob_id not in self.arrivals.blobs:
                    self.arrivals.check_size(saved.size, self.request.max_saved_bytes)  # others may have come
                    self.arrivals.take(blob_id, saved)
            await self.arrivals.wake()
        except ServiceFailure as error:
            error.failure.trace_id = self.id
            await self.arrivals.refuse(error.failure)

    async def no_room(self) -> None:
        """Note that neither the object store nor the disk behind it has room for a saved value."""
        await self.arrivals.refuse(self.arrivals.refusal or full(self.id))

    async def log(self, invoke: int, text: str) -> None:
        """Record a text that a block printed."""
        self.event_log.append(pb.Event(log=pb.Log(invoke=invoke, text=text)).SerializeToString())
        await self.arrivals.log()

    async def increment(self, event: bytes) -> None:
        """Take a serialized event with an increment that a block of a streamed trace saved.

        It goes on with the output of its step.
        """
        await self.arrivals.increment(event)

    async def blob(self, blob_id: str) -> Saved | None:
        """Return a saved value once it is here; None if it will never come."""
        return await self.arrivals.blob(blob_id, lambda: self.running)

    async def _run(self, engine: EngineStream, before: tuple[TraceRun, ...], counted: bool) -> None:
        ended: pb.Failure | None = None
        try:
            if counted:
                await self._dues.admit(self.key, self.request.tokens, self.request.size)
                self._accept()
                await self._dues.wait(self.key)
            left = await self._forward(engine, before)
            usage = self.progress.usage()
            await self.arrivals.wait_for_all()
            self.arrivals.check()
            self.arrivals.drop_unnamed()
            self._settling = True
            usage.saved_bytes = self.arrivals.saved_bytes
            await self._settle(pb.Event(done=pb.Done(usage=usage)).SerializeToString(), left)
        except asyncio.CancelledError:
            ended = self._cancelled()
        except Exception as error:
            ended = describe(error, self.id)
        finally:
            await self._end(ended)

    async def _settle(self, done: bytes, left: LeftVariables | None) -> None:
        """Make the trace's outcome outlive the session actor, then record that the trace is done."""
        variables: dict[str, Copy] = {}
        if left is not None:
            saves, mentioned = left
            mine, earlier, _ = named(saves)
            blobs = {name: self.arrivals.blobs[name] for name in mine} | {name: self.again[name] for name in earlier}
            variables = copies(saves.objects, mentioned, blobs)
        if self.request.keep or self.arrivals.blobs or self.again or variables:
            self.progress.end(None)
            await self._keep(self._kept(None, done), variables)
        self._variables.keep(variables)
        # A client that knows of the end may submit the next trace at once, which must find its quota free.
        self._dues.settle(self.key, self.progress.tokens, self.event_log.size)
        await self._dues.settled()
        self.event_log.append(done)

    def _kept(self, failure: pb.Failure | None, *more: bytes) -> KeptTrace:
        """Return the part of the trace that outlives the session actor: its events, and `more`."""
        return KeptTrace(
            dataclasses.replace(self.request, edits=()),
            self.progress,
            clock(),
            (*self.event_log.events, *more),
            failure,
            dict(self.arrivals.blobs),
            dict(self.again),
        )

    def _cancelled(self) -> pb.Failure:
        return failure(pb.ERROR_CODE_CANCELLED, "the trace was cancelled", trace_id=self.id, invoke=-1)

    async def _end(self, ended: pb.Failure | None) -> None:
        """End the event log and wake all waiting calls. Idempotent."""
        if self.running:
            self._dues.settle(self.key, self.progress.tokens, self.event_log.size)
            self.progress.end(ended)
            self.remotes.clear()
            self.request = dataclasses.replace(self.request, edits=())
            self.event_log.end(ended)
            if self._ended is not None:
                self._ended(self)
            if ended is not None and self.request.keep and not self.refused:
                with contextlib.suppress(*FULL):
                    self._said = self._keep(self._kept(ended), {})  # a follower of the trace does not wait for this
        await self.arrivals.wake()

    async def _forward(self, engine: EngineStream, before: Iterable[TraceRun]) -> LeftVariables | None:
        """Record the events of the engine; return the session variables that the trace leaves."""
        request, left = self.request, None
        shared: tuple[pb.Trace, int] | None = (
            None  # the trace of session variables, and how many entries the client's scope has
        )
        if request.variables:
            for run in before:
                await run.wait()
            trace = pb.Trace.FromString(request.trace)
            shared = trace, len(trace.scope.values)
            self.remotes.update(self._variables.lend(trace))
            request = dataclasses.replace(request, trace=trace.SerializeToString())
        saves: pb.Event | None = None  # those of the shared scope, held back until all invokes have ended
        failed = False
        async with contextlib.aclosing(engine(request)) as events:
            async for some in events:
                self.progress.begin()
                for data in apart(some):
                    kind = kind_of(data)
                    event = pb.Event.FromString(data) if kind in _READ else None
                    failed = failed or kind == "failed"
                    if event is not None and kind == "saves" and event.saves.invoke < 0 and shared is not None:
                        saves = event
                        continue
                    if event is not None and await self._look_into(kind, event):
                        data = event.SerializeToString()
                    self.event_log.append(data)
                await self._dues.grown()
                self.arrivals.check()
        if saves is not None and shared is not None:
            left = (saves.saves, self._variables.settle(shared[0], saves.saves, shared[1], failed))
            self._name(saves.saves)
            self.event_log.append(saves.SerializeToString())
        return left

    async def _look_into(self, kind: str, event: pb.Event) -> bool:
        """Take what the session must know from an event of the engine.

        Returns:
            Whether the event has changed.
        """
        if kind == "output":
            self.progress.generated(event.output)
            self.arrivals.expect_logs(event.output.logs)
            if self.request.stream:
                await self._before_output(event.output)
            return False
        if kind == "accounting":
            self.progress.accounted(event.accounting)
            return False
        if kind == "increment":
            await self._before_increment(event.increment)
            return self._name(event.increment)
        if kind == "saves":
            return self._name(event.saves)
        self.progress.failed(event.failed)
        event.failed.trace_id = self.id
        # A lost engine has failed every invoke. The trace as a whole may be tried again.
        with_retry(event.failed)
        if event.failed.code == pb.ERROR_CODE_UNAVAILABLE:
            raise ServiceFailure(event.failed)
        return True

    async def wait(self) -> None:
        """Wait until the trace has ended, well or not."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _name(self, message: pb.Saves | pb.Increment) -> bool:
        """Note which saved values must come from the workers.

        Values of earlier traces are here already.

        Returns:
            Whether the message has changed (`named`).

        Raises:
            ServiceFailure: the message names values of other traces that this trace does not use.
        """
        own, earlier, changed = named(message)
        if not earlier <= self.remotes.keys():  # no block gives that; a process of a block's might
            raise ServiceFailure(
                failure(pb.ERROR_CODE_INTERVENTION, "the trace saved a value that it never had", trace_id=self.id)
            )
        self.arrivals.expect_values(own)
        self.again.update((name, self.remotes[name]) for name in earlier)
        return changed

    async def _before_output(self, output: pb.Output) -> None:
        """Record what the steps of an output's tokens saved, once it is here."""
        self.arrivals.increments.generated(output)
        if output.finished:
            return  # the last increment came from the engine before this output
        await self.arrivals.wait_for(lambda: self.arrivals.increments.complete(output.invoke), "what a block saved")
        self._record(self.arrivals.increments.take(output.invoke))

    async def _before_increment(self, last: pb.Increment) -> None:
        """Record the increments that come before the last increment of an invoke."""
        await self.arrivals.wait_for(lambda: self.arrivals.increments.complete_before(last), "what a block saved")
        self._record(self.arrivals.increments.take_all(last.invoke))

    def _record(self, arrived: list[Arrived]) -> None:
        for increment, event in arrived:
            changed = self._name(increment)
            self.event_log.append(pb.Event(increment=increment).SerializeToString() if changed else event)
