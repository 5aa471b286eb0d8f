"""The traced requests of a worker: their blocks, their standing edits, and their traces.

A trace comes before its requests, or with its only request. A request is admitted when the engine first schedules it: its
program is bound, its trace's scope made or found, and its block becomes a mediator that waits for the first step. A program
that cannot be bound leaves a failure in its place, which the request's end reports. A request whose block need not run is not
admitted (`executor.interleave.deferred`).

Size: each kind of request, and what all of them have here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from executor.block.api import Program
from executor.block.edits import Edits
from executor.block.garbage import Garbage
from executor.block.greenlet_runner import Bounds, GreenletRunner
from executor.block.identity import Identity
from executor.block.mediator import Mediator
from executor.block.scope import Scope, TraceScope
from executor.block.state import BlockState, Progress, Record
from executor.block.uploads import Uploads
from executor.block.watchdog import padded
from executor.core.ended import Ended
from executor.core.programs import Codes, Unit
from executor.core.request import InvokeRequest, Opened
from executor.graphs.loops import TableLoops
from executor.graphs.table_loop import TableLoop
from executor.interleave.chunks import Chunks
from executor.interleave.context import Host
from executor.interleave.deferred import Deferral
from executor.interleave.explaining import ExplainingRunner
from executor.interleave.following import gathered, too_long
from executor.interleave.machine.events import Admitted, Event, Refused
from executor.interleave.planned import CHUNKED, PLANS_OFF, PlannedRunner, PlannedText
from executor.interleave.plans import Plans
from executor.interleave.sandboxed import Sandboxed, Taken
from executor.interleave.unbound import part_cached, why_unbound
from executor.model.describe import describe_tree
from executor.model.meta_tensors import Fakes
from executor.model.skips import Skips
from executor.plan.apart import why_not_planned
from executor.plan.prompt_rows import Asked, last_of, rows_of_prompt
from executor.plan.row_values import RowValues, forms_of_rows
from executor.sandbox.trace import SandboxedTrace
from executor.saves.stream import Increments, SaveStream
from interpose.v1 import trace_pb2 as pb


@dataclass(frozen=True)
class _Bound:
    """A block that is bound: its code, the names that it reads, and the tokens of its prompt."""

    code: CodeType
    namespace: dict[str, Any]
    prompt_tokens: int


class Requests:
    """The traced requests of one worker.

    Size: what a request has here is found by its key, and goes with it.

    Args:
        host: the worker.
        chunks: the prompts that come in chunks.
        muted: a context in which no hook of a step sees a module that is called.

    Attributes:
        mediators: the mediators of all unfinished requests, of their edits and of joint blocks, by key.
        ended: how the blocks ended that ended in this step, by request id.
        scopes: the scopes of the traces, and of the edits by their keys.
        streams: sends what streamed traces save, by request id, where this rank reports.
        deferral: the requests whose blocks need not run; None: all blocks run.
    """

    def __init__(self, host: Host, chunks: Chunks, muted: Callable[[], AbstractContextManager[object]]) -> None:
        self.mediators: dict[str, Mediator] = {}
        self.ended: dict[str, Ended] = {}
        self.scopes: dict[str, Scope] = {}
        self.streams: dict[str, Increments] = {}
        self._host = host
        self._chunks = chunks
        self._muted = muted
        self._opened: dict[str, Opened] = {}
        self._done: dict[str, set[int]] = {}  # ended invokes of the opened traces
        self._garbage = Garbage(host.budget)
        self._edits = Edits(host.tree, host.budget)
        self._stillborn: dict[str, tuple[Scope | None, pb.Failure]] = {}
        self._writes: dict[str, list[str]] = {}
        self._ids: dict[tuple[str, int], str] = {}  # (trace id, invoke) → the engine's request id
        self._brought: set[str] = set()
        self._arrivals = 0
        self._sandboxed = Sandboxed(host)
        self._plans = Plans(host.tree, host.loops, host.forms, host.ranks.several) if host.plans else None
        defers = host.plans and host.reports and not host.ranks.several
        self.deferral = Deferral(host, host.loops) if defers and host.loops is not None else None

    def __len__(self) -> int:
        return len(self._opened) + len(self.mediators) + len(self.scopes) + len(self._stillborn)

    @property
    def loops(self) -> TableLoops | None:
        """The loops that run in the tables; None: none does."""
        return self._host.loops

    def open(self, opened: Opened) -> None:
        """Take a trace whose requests come next.

        The trace stays until all its invokes have ended, or until it is dropped.
        """
        self._garbage.begin(here=not self._sandboxed.takes(opened))
        self._opened[opened.trace.id] = opened

    def tenant_of(self, trace_id: str) -> str:
        """Return the tenant of a trace, "" if the trace is not here."""
        opened = self._opened.get(trace_id)
        return opened.tenant if opened is not None else ""

    def close(self, trace_id: str, invoke: int) -> bool:
        """Note that an invoke has ended; return whether it was the last of its trace.

        After the last one, the trace is forgotten.
        """
        opened = self._opened.get(trace_id)
        done = self._done.setdefault(trace_id, set())
        done.add(invoke)
        if opened is not None and len(done) < len(opened.trace.invokes):
            return False
        self._forget(trace_id)
        return True

    def _forget(self, trace_id: str) -> Scope | None:
        """Forget a trace whose blocks have gone; return its scope."""
        self._opened.pop(trace_id, None)
        self._done.pop(trace_id, None)
        self._host.outbox.forget(trace_id)
        return self.scopes.pop(trace_id, None)

    def defer(self, request_id: str, request: InvokeRequest, prompt_tokens: int) -> bool:
        """Take in a request whose block need not run; return whether it is such a request.

        Its whole prompt is in the step that begins.
        """
        if self.deferral is None or request.shipment is None or request.gang or request.trace in self._opened:
            return False
        opened = Opened.of(request.shipment)
        defers = not self._sandboxed.takes(opened)
        if defers and self.deferral.take(request_id, opened, prompt_tokens, request):
            return True
        self.open(opened)
        return False

    def admit(
        self,
        request_id: str,
        request: InvokeRequest,
        prompt_tokens: int,
        cached_tokens: int,
        adopts: TableLoop | None = None,
        chunked: bool = False,
    ) -> list[Event]:
        """Make the mediators of a new request; return what the machine is to know of them.

        Args:
            request_id, request: the request.
            prompt_tokens, cached_tokens: of its prompt, and how many of these come from a cache.
            adopts: the loop of its block, if that went into the tables without the block.
            chunked: whether its prompt comes in chunks.
        """
        if request.shipment is not None and request.trace not in self._opened:
            self.open(Opened.of(request.shipment))
        opened = self._opened.get(request.trace)
        if opened is None:
            message = "the trace of this request was given up before the request could start"
            failure = pb.Failure(code=pb.ERROR_CODE_ENGINE, message=message)
            return [self._reject(request_id, None, request.trace, request.invoke, failure)]
        if self._sandboxed.takes(opened):
            return self._admit_sandboxed(request_id, request, opened, prompt_tokens, cached_tokens, chunked)
        trace, number = opened.trace, request.invoke
        scope: TraceScope | None = None
        invoke = trace.invokes[number]
        self._brought.update(_key_of(trace.id, index) for index in opened.joint)
        try:
            # What a block binds is its own to change; tensors made in the engine's inference mode are not.
            with torch.inference_mode(False):
                scope = self._scope_of(opened)
                code, namespace = scope.program(invoke.program, invoke.after)
                edits = self._edits.bind(request_id, opened, scope.arrival)
            if request.prefix or cached_tokens:
                if cached_tokens > prompt_tokens - request.last:
                    raise part_cached()
                self._close(request_id, request, opened, prompt_tokens, request.last)
            elif chunked:
                self._gather(request_id, request, opened, prompt_tokens, bool(edits))
        except Exception as error:
            return [self._reject(request_id, scope, trace.id, number, why_unbound(error))]
        bound = _Bound(code, namespace, prompt_tokens)
        identity = Identity(request_id, scope.id, number, gang=request.gang)
        gathers = self._chunks.gathers(request_id)
        source = None if gathers else invoke.program
        eager = cached_tokens > 0 and request.from_start
        mediator = self._mediator(identity, scope, opened, bound, source, not edits, adopts, cached_tokens, eager)
        came: list[Event] = []
        for edit in edits:
            self.scopes[edit.key] = edit.scope
            bound = _Bound(edit.code, edit.namespace, prompt_tokens)
            identity = Identity(edit.key, edit.scope.id, number, edit=edit.name, owner=request_id, rank=edit.rank)
            came.append(self._take_in(self._mediator(identity, edit.scope, opened, bound), edit.scope))
        apart = not (edits or request.gang or trace.scan or opened.mingles or gathers)
        came.append(self._take_in(mediator, scope, trace.stream, apart))
        self._writes[request_id] = list(invoke.program.writes)
        if trace.stream and self._host.reports:
            self.streams[request_id] = SaveStream(
                scope, invoke.program, number, self._host.limits, self._host.budget, self._host.outbox
            )
        self._ids[(scope.id, number)] = request_id
        for index, joint in opened.joint.items():
            if (scope.id, index) not in self._ids:
                came.append(self._admit_joint(scope, opened, index, joint, request.gang))
        return came

    def why_not_gathered(self, opened: Opened, invoke: int, prompt_tokens: int) -> pb.Failure | None:
        """Return why a block cannot run over a prompt in chunks; None if it can."""
        invoked = opened.trace.invokes[invoke]
        request = InvokeRequest(opened.trace.id, invoke, int(invoked.gang))
        try:
            if self._sandboxed.takes(opened):
                raise too_long(prompt_tokens, self._host.step_tokens, "its block runs in a sandbox")
            others = bool(opened.joint or opened.trace.edits)
            gathered(self._host, opened, request, "", prompt_tokens, self._muted, others)
        except Exception as error:
            return why_unbound(error)
        return None

    def _close(
        self, request_id: str, request: InvokeRequest, opened: Opened, prompt_tokens: int, last: int = 0
    ) -> None:
        """Have a block get no rows of its prompt but the last; the others may come from a cache.

        Raises:
            Refusal: this was not shown of all blocks that see the request's rows.
        """
        if not request.prefix or request.gang > 1 or opened.joint or opened.trace.applied:
            raise part_cached()
        self._chunks.close(request_id, prompt_tokens, last)

    def _gather(
        self, request_id: str, request: InvokeRequest, opened: Opened, prompt_tokens: int, edited: bool
    ) -> None:
        """Have what a block reads of its prompt gathered over the chunks.

        Raises:
            NotFollowed: the block cannot run over a prompt that comes in chunks.
        """
        needs, shadow_of = gathered(
            self._host, opened, request, request_id, prompt_tokens, self._muted, edited or bool(opened.joint)
        )
        self._chunks.add(request_id, prompt_tokens, needs, shadow_of)

    def _admit_sandboxed(
        self,
        request_id: str,
        request: InvokeRequest,
        opened: Opened,
        prompt_tokens: int,
        cached_tokens: int,
        chunked: bool,
    ) -> list[Event]:
        """Make the mediators of a request whose blocks run in a sandbox."""
        trace, came = opened.trace, list[Event]()
        keys = {index: _key_of(trace.id, index) for index in opened.joint}
        self._brought.update(keys.values())
        joint = {index: key for index, key in keys.items() if (trace.id, index) not in self._ids}
        found = self.scopes.get(trace.id)
        scope = found if isinstance(found, SandboxedTrace) else None
        try:
            if request.prefix or cached_tokens:
                self._close(request_id, request, opened, prompt_tokens)
            if chunked:
                raise too_long(prompt_tokens, self._host.step_tokens, "its block runs in a sandbox")
            if scope is None:
                scope = self._sandboxed.open(opened, self._arrivals)
                self._arrivals += 1
                self.scopes[scope.id] = scope
        except Exception as error:
            failures = {key: why_unbound(error) for key in (request_id, *joint.values())}
            taken = Taken(failures=failures)
        else:
            taken = self._sandboxed.admit(scope, opened, request_id, request, prompt_tokens, joint)
        for key, failure in taken.failures.items():
            index = next((index for index, one in joint.items() if one == key), request.invoke)
            came.append(self._reject(key, scope, trace.id, index, failure, joint=key != request_id))
        if scope is None:
            return came
        for edit, edit_scope in taken.edits:
            self.scopes[edit_scope.id] = edit_scope
            came.append(self._take_in(edit, edit_scope))
        for mediator in (*((taken.own,) if taken.own is not None else ()), *taken.joint):
            identity = mediator.identity
            self._writes[identity.request_id] = []
            self._ids[(trace.id, identity.invoke)] = identity.request_id
            apart = scope.lone and not (identity.joint or identity.gang or trace.scan)
            came.append(self._take_in(mediator, scope, trace.stream and not identity.joint, apart))
        if taken.stream is not None:
            self.streams[request_id] = taken.stream
        if taken.own is not None:
            taken.own.state.record.tally.cached_tokens = cached_tokens
        return came

    def _admit_joint(self, scope: TraceScope, opened: Opened, index: int, invoke: pb.Invoke, gang: int) -> Event:
        """Make the mediator of a joint block; it starts with the trace's other blocks."""
        key = _key_of(scope.id, index)
        try:
            with torch.inference_mode(False):
                code, namespace = scope.program(invoke.program, ())
        except Exception as error:
            return self._reject(key, scope, scope.id, index, why_unbound(error), joint=True)
        identity = Identity(key, scope.id, index, gang=gang, joint=True)
        mediator = self._mediator(identity, scope, opened, _Bound(code, namespace, 0))
        self._writes[key] = list(invoke.program.writes)
        self._ids[(scope.id, index)] = key
        return self._take_in(mediator, scope)

    def _take_in(self, mediator: Mediator, scope: Scope, streamed: bool = False, apart: bool = False) -> Admitted:
        identity = mediator.identity
        self.mediators[identity.request_id] = mediator
        return Admitted(
            key=identity.request_id,
            trace=identity.trace_id,
            invoke=identity.invoke,
            arrival=scope.arrival,
            prompt_tokens=mediator.state.progress.prompt_tokens,
            gang=identity.gang,
            joint=identity.joint,
            owner=identity.owner,
            rank=identity.rank,
            streamed=streamed,
            apart=apart,
        )

    def _mediator(
        self,
        identity: Identity,
        scope: TraceScope,
        opened: Opened,
        bound: _Bound,
        source: pb.Program | None = None,
        alone: bool = False,
        adopts: TableLoop | None = None,
        cached_tokens: int = 0,
        eager: bool = False,
    ) -> Mediator:
        """Make the mediator of a block.

        Args:
            source: the block's text, of a block whose steps may run as plans.
            alone: whether no standing edit runs in the request, so that the block's loop may go into the tables.
            adopts, cached_tokens: as of `admit`.
            eager: as of `PlannedText`.
        """
        trace, last = opened.trace, self._chunks.last_of(identity.request_id)
        state = BlockState(
            identity,
            scope.registry,
            emit=lambda text: (
                not trace.explain and self._host.outbox.log(opened.session, trace.id, identity.invoke, text)
            ),
            progress=Progress(bound.prompt_tokens, last or 0),
            record=Record(Skips(self._host.tree)),
            fakes=Fakes() if trace.scan else None,
        )
        state.record.tally.cached_tokens = cached_tokens
        program = Program(bound.code, bound.namespace, scope.sources.lines, streamed=trace.stream)
        bounds = Bounds(self._host.budget, padded(trace.id), scope.random_state())
        runner = GreenletRunner(state, program, self._host.tree, self._host.applier, bounds)
        if trace.explain and source is not None and self._host.facts is not None:
            names = frozenset(source.writes)
            common = frozenset(name for name in names if name in scope.shared)
            read = PlannedText(Unit.of_block(source), scope.sources.lines, names, common)
            facts = self._host.facts()
            values = RowValues.of(describe_tree(self._host.tree), forms_of_rows(facts.forms))
            touched = rows_of_prompt(trace, identity.invoke, values)
            last = None if isinstance(touched, Asked) else last_of(touched, bound.prompt_tokens, self._host.step_tokens)
            return Mediator(state, ExplainingRunner(state, runner, read, bounds, facts, last))
        draws = bounds.random_state is not None
        edit, gang = bool(identity.edit), bool(identity.joint or identity.gang)
        why = PLANS_OFF if self._plans is None else why_not_planned(trace, edit, gang, draws)
        state.record.tally.why = why
        if self._chunks.gathers(identity.request_id):
            state.record.tally.why = CHUNKED
        if self._plans is None or source is None or state.record.tally.why:
            return Mediator(state, runner)
        tenant = opened.tenant if alone and not trace.stream else None
        writes = frozenset(source.writes)
        shared = frozenset(name for name in writes if name in scope.shared)
        # A stack is what a message has of many tensors; code of classes runs while their objects are encoded.
        lone = scope.expected == 1 and alone and not trace.stream and not scope.of_session
        unseen = lone and scope.stacks and not scope.sources.final and not scope.sources.classes
        learn = None
        if unseen and tenant is not None and self.deferral is not None and adopts is None and not cached_tokens:
            learn = self.deferral.learner(opened, bound.prompt_tokens)
        text = PlannedText(
            Unit.of_block(source), scope.sources.lines, writes, shared, tenant, unseen, learn, last, eager
        )
        return Mediator(state, PlannedRunner(state, runner, text, bounds, self._plans, adopts))

    def _scope_of(self, opened: Opened) -> TraceScope:
        scope = self.scopes.get(opened.trace.id)
        if not isinstance(scope, TraceScope):
            scope = TraceScope(
                opened.trace,
                len(opened.trace.invokes),
                opened.session,
                self._host.tree,
                Uploads(
                    lambda blob: self._host.outbox.get(opened.session, opened.trace.id, blob.id),
                    opened.tenant,
                    self._host.constants,
                ),
                self._host.budget,
                Codes(opened.codes),
                arrival=self._arrivals,
            )
            self._arrivals += 1
            self.scopes[scope.id] = scope
        return scope

    def _reject(
        self, key: str, scope: Scope | None, trace_id: str, invoke: int, failure: pb.Failure, joint: bool = False
    ) -> Refused:
        failure.trace_id, failure.invoke = trace_id, invoke
        self._stillborn[key] = (scope, failure)
        self._ids[(trace_id, invoke)] = key
        return Refused(key, trace_id, joint)

    def knows(self, key: str) -> bool:
        """Return whether a request or a joint block is here, bound or not."""
        return key in self.mediators or key in self._stillborn

    def after_step(self) -> None:
        """A step is over: collect what blocks left behind."""
        self._garbage.look(len(self.mediators))

    def take_brought(self) -> list[str]:
        """Return the keys of the joint blocks that came with new requests, bound or not."""
        brought = sorted(self._brought)
        self._brought.clear()
        return brought

    def take_id(self, trace_id: str, invoke: int) -> str:
        """Return the engine's id of an invoke's request, "" if it is not here, and forget it."""
        return self._ids.pop((trace_id, invoke), "")

    def take_stillborn(self, request_id: str) -> tuple[Scope | None, pb.Failure] | None:
        """Forget a request whose block could not be bound; return its scope, and why.

        If the block was bound, the call returns None.
        """
        return self._stillborn.pop(request_id, None)

    def leave(self, key: str) -> tuple[Mediator, list[str], Increments | None]:
        """A block has ended with its request.

        Returns:
            The block, the names that it may give to other invokes, and what streams its saves.
        """
        self.ended.pop(key, None)
        return self.mediators.pop(key), self._writes.pop(key), self.streams.pop(key, None)

    def forget(self, key: str) -> int:
        """Drop a block and its names; return how often a standing edit printed."""
        mediator = self.mediators.pop(key)
        if not mediator.identity.edit:
            mediator.cancel()
        mediator.let_go(mediator.names.clear)
        self._writes.pop(key, None)
        self.streams.pop(key, None)
        self.ended.pop(key, None)
        scope = self.scopes.pop(key, None)
        if scope is not None:
            scope.let_go()
        return mediator.state.record.logs if mediator.identity.edit else 0

    def drop(self, trace_id: str) -> None:
        """Forget a trace whose blocks have been dropped. Idempotent."""
        for request_id, (_, failure) in list(self._stillborn.items()):
            if failure.trace_id == trace_id:
                del self._stillborn[request_id]
                self.ended.pop(request_id, None)
        for key in [key for key in self._ids if key[0] == trace_id]:
            del self._ids[key]
        scope = self._forget(trace_id)
        if scope is not None:
            scope.let_go()
        self.look_idle()

    def look_idle(self) -> None:
        """If nothing of any trace is here any more, have Python collect by itself again."""
        if not self:
            self._garbage.end()


def _key_of(trace_id: str, invoke: int) -> str:
    """What stands for an invoke without a prompt where a request id stands for others."""
    return f"{trace_id}*{invoke}"
