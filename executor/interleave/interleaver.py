"""Interleaves blocks with the forward pass: carries out what the state machine decides.

The runner says when requests come, where a step's rows are, and when the step begins and ends; hooks say when the model is at a
location. The interleaver makes events of that for the machine (`executor.interleave.machine`), and carries out its instructions:
blocks run, values are served and written back, numbers are exchanged over the ranks, and the modules are hooked that blocks
wait for.

Size: each instruction of the machine is carried out here or handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from executor.core.ended import Ended, Ending
from executor.core.location import Kind
from executor.core.request import Batch, InvokeRequest, Opened, Span
from executor.core.text import clip
from executor.graphs.loops import TableLoops
from executor.graphs.table_loop import Left
from executor.interleave.admission import Requests
from executor.interleave.chunks import Chunks
from executor.interleave.comparing import Comparing
from executor.interleave.context import Host
from executor.interleave.finish import Endings
from executor.interleave.machine.events import (
    Arrived,
    CacheSpoilt,
    Dropped,
    Event,
    Failure,
    Generated,
    ModelRan,
    Preempted,
    Reached,
    Recorded,
    Returned,
    SkipsChecked,
    StartedEarly,
    StepBegan,
    StepEnded,
    Streamed,
)
from executor.interleave.machine.instructions import (
    AwaitCache,
    BeginStep,
    Break,
    Cancel,
    CheckCache,
    CheckSkips,
    Fail,
    FailForEdit,
    Hook,
    Instruction,
    Record,
    Report,
    See,
    Stream,
    Withdraw,
)
from executor.interleave.machine.machine import Machine
from executor.interleave.recorders import Recorders
from executor.interleave.running import Running
from executor.interleave.serving import Visit
from executor.interleave.spent import Spent
from executor.model.hooks import Hooks
from executor.model.node import Node
from executor.model.rows import Rows
from executor.model.tree import LOGITS, PSEUDO, SAMPLES
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb


class Interleaver:
    """The blocks of one worker.

    Size: an event of the machine is made of each thing that happens to requests.

    Args:
        host: the worker.

    Attributes:
        mediators: the mediators of all unfinished traced requests, by request id.
        deferred: the requests whose blocks need not run, by request id; they have no mediator.
        ended: how the blocks ended that ended in this step, by request id; the runner takes it. `Ended.READ_ONLY`: the
            request goes on without its block; any other member: it must end too.
        stages: the pipeline's stages.
        hooks: where the blocks of the step are served.
        chunks: the prompts that come in chunks.
        waits: returns the keys of the blocks that wait for a coming step of a request.
        spent: the time that tenants' blocks take.
    """

    def __init__(self, host: Host) -> None:
        self.stages = host.stages
        self._sandboxed = host.sandboxes is not None
        self._tree = host.tree
        self._budget = host.budget
        self._cache = host.cache
        self.hooks = Hooks(host.tree, lambda node, kind, value: self._visit(node, kind, value, self._token_rows))
        self.chunks = Chunks(host, self.hooks.add)
        self._requests = Requests(host, self.chunks, self.hooks.muted)
        self.mediators = self._requests.mediators
        self._deferral = self._requests.deferral
        self.deferred = self._deferral.here if self._deferral is not None else {}
        self.ended = self._requests.ended
        self.spent = Spent(self._requests.mediators, self._requests.tenant_of)
        self._recorders = Recorders(host.tree, self.hooks.add, host.limits.max_saved_bytes)
        self._running = Running(
            self.mediators,
            self._requests.scopes,
            self._recorders,
            host,
            self.hooks.muted,
            self.chunks.serve,
            self.chunks.closed,
        )
        self.chunks.serve_with(self._running.serving)
        self._endings = Endings(self._requests, self._running, host)
        self._machine = Machine(alone=not host.ranks.several)
        self.waits = self._machine.blocks.waits
        self._batch = Batch({}, 0, 0, 0)
        self._do: dict[type[Instruction], Callable[[Any], Event | None]] = {
            **self._running.handlers(),
            **self._endings.handlers(),
            **Comparing(self.mediators, host).handlers(),
            CheckCache: self._check_cache,
            AwaitCache: lambda do: CacheSpoilt(self._cache.wait(do.blocks)),
            CheckSkips: self._check_skips,
            Record: self._record,
            Stream: self._stream,
            BeginStep: self._begin_blocks,
            See: self._see,
            Hook: self._hook,
            Break: self._break,
            Fail: lambda do: self._fail(do.block, _message(do.failure)),
            FailForEdit: self._fail_for_edit,
            Cancel: lambda do: self.mediators[do.block].cancel(),
            Withdraw: lambda do: self.mediators[do.block].withdraw(),
            Report: self._report,
        }

    @property
    def idle(self) -> bool:
        """Whether nothing of any trace is held."""
        return self._machine.idle and not (self._requests or self.hooks or self.deferred or self.chunks.prompts)

    @property
    def loops(self) -> TableLoops | None:
        """The loops that run in the tables; None: none does."""
        return self._requests.loops

    @property
    def lives(self) -> bool:
        """Whether a block waits for a coming step."""
        return bool(self._machine.blocks.live)

    def take_ended(self) -> dict[str, Ended]:
        """Return what `ended` holds, and empty it."""
        ended = dict(self.ended)
        self.ended.clear()
        return ended

    def _feed(self, event: Event | None) -> None:
        """Tell the machine of an event, and carry out what follows until the machine is done."""
        handle, do = self._machine.handle, self._do
        while event is not None:
            answer = None
            for instruction in handle(event):
                answer = do[type(instruction)](instruction)
            event = answer

    # Requests.

    def open(self, opened: Opened) -> None:
        """Take a trace whose requests come next."""
        self._requests.open(opened)

    def defer(self, request_id: str, request: InvokeRequest, prompt_tokens: int) -> bool:
        """Take in a new request whose block need not run; return whether it is such a request.

        Its whole prompt is in the step that begins. The request's loop is in the tables then.
        """
        return self._requests.defer(request_id, request, prompt_tokens)

    def admit(
        self, request_id: str, request: InvokeRequest, prompt_tokens: int, cached_tokens: int, rows: int | None = None
    ) -> None:
        """Make the mediator of a new request; the block starts when its first step begins.

        Args:
            rows: the request's rows in the step, if these are not the whole prompt. The block starts with the last of them then.
        """
        chunked = rows is not None and cached_tokens + rows < prompt_tokens
        for event in self._requests.admit(request_id, request, prompt_tokens, cached_tokens, chunked=chunked):
            self._feed(event)

    def why_not_gathered(self, opened: Opened, invoke: int, prompt_tokens: int) -> pb.Failure | None:
        """Return why a block cannot run over a prompt that comes in chunks; None if it can."""
        return self._requests.why_not_gathered(opened, invoke, prompt_tokens)

    def admitted(self, request_ids: Sequence[str]) -> None:
        """Compare over the ranks which new requests were admitted.

        A request that could not be bound on one rank fails on all.
        """
        self._feed(Arrived((*request_ids, *self._requests.take_brought())))

    def start_early(self, request_ids: Iterable[str]) -> None:
        """Start new requests' blocks whose loops may be in the tables from the prompt's step on.

        Args:
            request_ids: the requests, whose whole prompts are in the step that begins.
        """
        mediators = self.mediators
        early = tuple(one for one in request_ids if one in mediators and mediators[one].may_start_early)
        if early:
            self._budget.begin_step()
            self._feed(StartedEarly(early))

    def preempted(self, request_id: str) -> None:
        """The engine evicted a request and computes it anew, without its block's changes.

        Chunks of a prompt are gathered anew.
        """
        if request_id in self.chunks:
            return
        self._bring_back(request_id)
        self._feed(Preempted(request_id))

    def finish(self, trace_id: str, invoke: int, result: Result | list[Result]) -> Ending:
        """The engine finished an invoke's request: end its block, and send what it saved.

        Args:
            trace_id, invoke: the invoke.
            result: what the engine generated; for a joint block, what it generated for each request of the gang.

        Returns:
            How the block ended (`Ended.UNKNOWN` if it is not here), events for the client (Saves,
            Failed, Accounting), serialized, and how many times the block printed.
        """
        deferral = self._deferral
        if deferral is not None and isinstance(result, Result) and (key := deferral.id_of(trace_id)):
            ending = deferral.finish({key: len(result.token_ids)}).get(key)
            if ending is not None:
                return ending
            self._run_deferred(key)
        key = self._requests.take_id(trace_id, invoke)
        if not self._requests.knows(key):
            return Ended.UNKNOWN, [], 0
        if isinstance(result, Result):
            self._bring_back(key, len(result.token_ids))
        self._endings.begin(key, trace_id, invoke, result)
        with self.spent.of(self._requests.tenant_of(trace_id)):
            self._feed(Generated(key))
        self.chunks.keep(self.mediators)
        return self._endings.take()

    def finish_deferred(self, generated: Mapping[str, int]) -> dict[str, Ending]:
        """End requests whose blocks did not run; return what `finish` returns, by trace.

        A trace of one request that is missing is for `finish`.

        Args:
            generated: how many tokens the engine generated for the requests, by trace.
        """
        deferral = self._deferral
        if deferral is None:
            return {}
        traces = {key: trace for trace in generated if (key := deferral.id_of(trace))}
        found = deferral.finish({key: generated[trace] for key, trace in traces.items()})
        return {traces[key]: ending for key, ending in found.items()}

    def _run_deferred(self, key: str) -> None:
        """Have the block of a deferred request run after all, up to its loop, which it takes over."""
        deferral, loops = self._deferral, self.loops
        if deferral is None or loops is None or key not in deferral:
            return
        deferred = deferral.pop(key)
        left, request = deferred.left, deferred.request
        self._requests.open(deferred.opened)
        loop = loops.loop_of(key) if left is None else left.loop
        for event in self._requests.admit(key, request, deferred.prompt_tokens, 0, loop):
            self._feed(event)
        mediator = self.mediators.get(key)
        if mediator is not None:
            self._budget.begin_step()
            self._feed(StartedEarly((key,)))
        if mediator is None or not mediator.state.waits.away:  # it has failed
            loops.drop(key)
        elif left is not None:
            self._take_back(key, left, False)

    def drop(self, trace_id: str) -> None:
        """The trace was given up: end its blocks and forget it. Idempotent."""
        if self._deferral is not None:
            self._deferral.drop(trace_id)
        self._feed(Dropped(trace_id))
        self._requests.drop(trace_id)
        self.chunks.keep(self.mediators)

    # A step.

    def bring_back_due(self, request_ids: Iterable[str]) -> None:
        """Bring the loops back whose requests come to a step that is not theirs any more."""
        if self.loops is not None and self.loops:
            for request_id in filter(self.loops.due, request_ids):
                self._bring_back(request_id, again=True)

    def end_tables(self) -> None:
        """The step was given to the device: loops leave whose blocks ask for nothing later."""
        loops = self.loops
        assert loops is not None
        loops.end_step()
        for key in loops.rest():
            if not loops.changes((key,)):
                self.ended[key] = Ended.READ_ONLY

    def _bring_back(self, key: str, steps: int | None = None, again: bool = False) -> None:
        """Bring a request's loop back from the tables, if it has one there.

        Args:
            key: the request.
            steps: how many steps the request had; None: as many as ran.
            again: whether the loop may go there again, with the plan for the steps that follow. Of several ranks each goes there
                after a turn of the block only, because the ranks compare turns.
        """
        self._run_deferred(key)
        if self.loops is not None and key in self.loops:
            self._take_back(key, self.loops.leave(key, steps), again and self._machine.alone)

    def _take_back(self, key: str, left: Left, again: bool) -> None:
        """Let a block go on whose loop has left the tables; `again` is as of `_bring_back`."""
        waits = left.loop.back(left, again)
        self._feed(Returned(key, left.passed, waits, self.mediators[key].state.waits.away, left.loop.writes))

    @property
    def announces(self) -> bool:
        """Whether blocks in processes of their own may be told of a step before it begins."""
        return self._sandboxed and self.stages.last == 0

    def announce(self, keys: Iterable[str]) -> None:
        """Tell blocks in processes of their own that the step begins for which they wait.

        They run while the engine prepares the step. The step must begin next, with all of these blocks.

        Args:
            keys: the blocks that wait for the step.
        """
        for key in keys:
            mediator = self.mediators.get(key)
            if mediator is not None and mediator.own_process:
                mediator.announce()

    def begin_step(self, batch: Batch) -> None:
        """A forward begins: start and resume the blocks that wait for it.

        On a later pipeline stage the step is under way, and this stage's part of it begins.
        """
        if self.stages.mine == 0:
            self.stages.begin(batch)
            self._begin(batch)
        else:  # without the blocks that have ended on the way
            spans = {key: span for key, span in self._batch.spans.items() if key in batch.spans}
            if batch != replace(self._batch, spans=spans):
                raise RuntimeError("the pipeline stages laid out the rows of a step differently")

    def follow(self, stages: Iterable[int]) -> None:
        """Take part in a step while other pipeline stages compute their parts.

        If the last stage is among them, the step ends.
        """
        for stage in stages:
            if stage == 0:
                self._begin(self.stages.begun())
            while (at := self.stages.announced(stage)) is not None:
                node = self._tree.find(at[0])
                assert node is not None
                self._visit(node, at[1], None, self._token_rows)
            if stage == self.stages.last:
                self._end_step()

    def _begin(self, batch: Batch) -> None:
        self._batch = batch
        self._budget.begin_step()
        self.hooks.begin_step()
        self._running.in_step = True
        self.spent.ran()
        rows = self.chunks.rows
        self._feed(StepBegan({key: rows(key) or span.stop - span.start for key, span in batch.spans.items()}))
        self.chunks.enter(batch.chunks)

    def padded_to(self, rows: int) -> None:
        """The step's tensors have so many rows, with those that nobody uses."""
        self._batch = replace(self._batch, padded_tokens=rows)

    def end_forward(self) -> None:
        """The modules have run: take the hooks away."""
        self.hooks.clear()

    def check_cache(self) -> None:
        """The model has run: see what changed requests left in the cache.

        The step's forward context must still be there.
        """
        self.chunks.check_cache()
        self._feed(ModelRan())

    def visit_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Serve `logits.output`, [requests, vocab], before sampling; return what to sample from."""
        return self._visit_requests(LOGITS, logits)

    def visit_samples(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Serve `samples.output`, [requests, 1], after sampling; return what was sampled."""
        return self._visit_requests(SAMPLES, token_ids)

    def end_step(self) -> None:
        """The step is over, on the last stage: a location that has not come will not come."""
        self.stages.end()
        self._end_step()

    def _end_step(self) -> None:
        self._running.in_step = False
        self._recorders.clear()
        self._feed(StepEnded())
        self.chunks.end_step()
        self._requests.after_step()

    def break_off(self) -> None:
        """The step that may be under way on this rank will not be finished. Idempotent."""
        if self._running.in_step:
            self._end_step()

    def let_pass(self) -> None:
        """A step goes by in which no block waits for anything, while there are traces."""
        self._requests.after_step()

    # A location.

    def _visit_requests(self, path: str, value: torch.Tensor) -> torch.Tensor:  # [requests, ...]
        requests = self._batch.requests
        return self._visit(
            self._tree.pseudo[path],
            Kind.OUTPUT,
            value,
            lambda span: Rows(span.index, span.index + 1, requests, value.shape[0]),
        )

    def _token_rows(self, span: Span) -> Rows:
        return Rows(span.start, span.stop, self._batch.tokens, self._batch.padded_tokens, self._tree.axes)

    def _visit(self, node: Node, kind: str, value: Any, rows_of: Callable[[Span], Rows]) -> Any:
        """The model is at a location; return the value to go on with."""
        key = (node.path, str(kind))
        chunks = self.chunks.at(*key)
        if key not in self._machine.waiting and not self._recorders.at(*key) and not chunks:
            return value
        self.stages.announce(*key)
        visit = Visit(node, kind, self._tree.order_of(node.path, kind), value, rows_of)
        self._running.visit = visit
        try:
            self._feed(Reached(*key, visit.position))
            if chunks:
                self.chunks.visit(visit)
        finally:
            self._running.visit = None
        return visit.value

    # What carries out the instructions.

    def _begin_blocks(self, do: BeginStep) -> None:
        spans = self._batch.spans
        self._running.spans = {key: (spans[key],) for key in do.blocks if key in spans}
        for key in do.blocks:
            mediator = self.mediators[key]
            mediator.begin_step()
            if mediator.state.record.recorders:
                self._recorders.enlist(mediator)

    def _see(self, do: See) -> None:
        self._running.spans[do.block] = tuple(self._batch.spans[key] for key in do.requests)

    def _hook(self, do: Hook) -> None:
        if do.path not in PSEUDO:
            self.hooks.add(do.path, do.kind)

    def _break(self, do: Break) -> None:
        self._requests.scopes[do.trace].barriers[do.number].broken = do.why

    def _report(self, do: Report) -> None:
        self.ended[do.request] = do.ended

    def _check_cache(self, do: CheckCache) -> CacheSpoilt:
        spans = {key: self._running.spans[key] for key in self._running.changed(do.blocks)}
        if spans:
            self._cache.check(spans)
        return CacheSpoilt(self._cache.poll(), frozenset(spans))

    def _check_skips(self, do: CheckSkips) -> SkipsChecked:
        mediator = self.mediators[do.block]
        gap = mediator.state.record.skips.missed(mediator.state.progress.step)
        return SkipsChecked(None if gap is None else Failure(gap.code, gap.message, gap.location))

    def _record(self, do: Record) -> Recorded:
        mediator, visit = self.mediators[do.block], self._running.visit
        assert visit is not None
        path, kind = visit.node.path, str(visit.kind)
        scope = self._requests.scopes[mediator.identity.trace_id]
        for owner, recorder in self._recorders.at(path, kind):
            if owner is not mediator:
                continue
            rows, index = self._running.rows(mediator, visit)
            give = partial(self._running.serving.give, mediator, visit, f"{path}.{kind}", rows, index)
            failure = self._recorders.record(mediator, recorder, path, kind, give, scope)
            if failure is not None:
                return Recorded(failure)
        return Recorded()

    def _stream(self, do: Stream) -> Streamed:
        stream = self._requests.streams.get(do.block)
        if stream is None:  # another rank reports
            return Streamed()
        mediator = self.mediators[do.block]
        return Streamed(stream.step(mediator.names, mediator.state.steps, do.last))

    def _fail(self, key: str, failure: pb.Failure) -> None:
        mediator = self.mediators[key]
        failure.trace_id, failure.invoke = mediator.identity.trace_id, mediator.identity.invoke
        mediator.fail(failure)
        self._running.leave(mediator)

    def _fail_for_edit(self, do: FailForEdit) -> None:
        edit = self.mediators[do.edit]
        failure = pb.Failure()
        if edit.state.ending.failure is not None:
            failure.CopyFrom(edit.state.ending.failure)
        failure.message = clip(f"in the edit {edit.identity.edit!r}: {failure.message}")
        self._fail(do.block, failure)


def _message(failure: Failure | pb.Failure) -> pb.Failure:
    """Return a failure as it travels."""
    if isinstance(failure, pb.Failure):
        return failure
    return pb.Failure(
        code=failure.code,  # type: ignore[arg-type]
        message=clip(failure.message),
        location=failure.location,
        exception_type=failure.exception_type,
        exception_message=failure.exception_message,
    )
