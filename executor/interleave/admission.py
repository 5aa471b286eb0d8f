"""The traced requests that a worker has: their blocks, what standing edits run in them, and the traces they belong to.

A trace comes before its requests, or with its only request. A request is admitted when the engine first schedules it: its
program is bound, its trace's scope made or found, and its block becomes a mediator that waits for the first step. A program
that cannot be bound leaves a failure in its place, which the request's end reports.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from executor.block.api import Program
from executor.block.binding import BindingFailed
from executor.block.garbage import Garbage
from executor.block.greenlet_runner import Bounds, GreenletRunner
from executor.block.identity import Identity
from executor.block.mediator import Mediator
from executor.block.scope import TraceScope
from executor.block.state import BlockState, Progress, Record
from executor.block.watchdog import padded
from executor.core.ended import Ended
from executor.core.errors import Refusal
from executor.core.programs import Codes
from executor.core.request import InvokeRequest, Opened
from executor.core.text import clip
from executor.interleave.context import Host
from executor.interleave.edits import Edits
from executor.model.meta_tensors import Fakes
from executor.model.skips import Skips
from executor.saves.stream import SaveStream
from interpose.v1 import trace_pb2 as pb
from interpose.wire.encoder import WireError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Bound:
    """A block that is bound: its code, the names that it reads, and the tokens of its prompt."""

    code: CodeType
    namespace: dict[str, Any]
    prompt_tokens: int


class Requests:
    """The traced requests of one worker.

    Args:
        host: the worker.

    Attributes:
        mediators: the mediators of all unfinished requests and of their edits, by request id or the edit's key.
        live: those of them that wait for something in a coming step, or must see that there is none.
        ended: how the blocks ended that ended in this step, by request id.
        scopes: the scopes of the traces, and of the edits by their keys.
        wholes: the blocks without a prompt, by trace id.
        streams: sends what streamed traces save, by request id, where this rank reports.
        after_step: to be called when a step is over; collects what blocks left behind.
    """

    def __init__(self, host: Host) -> None:
        self.mediators: dict[str, Mediator] = {}
        self.live: dict[str, Mediator] = {}
        self.ended: dict[str, Ended] = {}
        self.scopes: dict[str, TraceScope] = {}
        self.wholes: dict[str, list[Mediator]] = {}
        self.streams: dict[str, SaveStream] = {}
        self._tree = host.tree
        self._applier = host.applier
        self._budget = host.budget
        self._outbox = host.outbox
        self._limits = host.limits
        self._reports = host.reports
        self._opened: dict[str, Opened] = {}
        self._done: dict[str, set[int]] = {}  # ended invokes of the opened traces
        self._garbage = Garbage(host.budget)
        self.after_step = self._garbage.look
        self._edits = Edits(host.tree, host.budget)
        self._stillborn: dict[str, tuple[TraceScope | None, pb.Failure]] = {}
        self._writes: dict[str, list[str]] = {}
        self._ids: dict[tuple[str, int], str] = {}  # (trace id, invoke) → the engine's request id
        self._brought: set[str] = set()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._opened) + len(self.mediators) + len(self.scopes) + len(self._stillborn) + len(self._edits)

    def open(self, opened: Opened) -> None:
        """Take a trace whose requests come next. It stays until all its invokes have ended, or until it is dropped."""
        self._garbage.begin()
        self._opened[opened.trace.id] = opened

    def close(self, trace_id: str, invoke: int) -> bool:
        """Note that an invoke has ended; return whether it was the last of its trace, which is then forgotten."""
        opened = self._opened.get(trace_id)
        done = self._done.setdefault(trace_id, set())
        done.add(invoke)
        if opened is not None and len(done) < len(opened.trace.invokes):
            return False
        self._forget(trace_id)
        return True

    def _forget(self, trace_id: str) -> TraceScope | None:
        """Forget a trace whose blocks have gone; return its scope."""
        self._opened.pop(trace_id, None)
        self._done.pop(trace_id, None)
        self._outbox.forget(trace_id)
        return self.scopes.pop(trace_id, None)

    def admit(self, request_id: str, request: InvokeRequest, prompt_tokens: int, cached_tokens: int) -> None:
        """Make the mediator of a new request; the block starts when its first step begins."""
        if request.carried is not None and request.trace not in self._opened:
            self.open(Opened.of(request.carried))
        opened = self._opened.get(request.trace)
        if opened is None:
            message = "the trace of this request was given up before the request could start"
            failure = pb.Failure(code=pb.ERROR_CODE_ENGINE, message=message)
            self._reject(request_id, None, request.trace, request.invoke, failure)
            self.ended[request_id] = Ended.FAILED
            return
        trace, number = opened.trace, request.invoke
        scope: TraceScope | None = None
        invoke = trace.invokes[number]
        self._brought.update(_key_of(trace.id, index) for index in opened.wholes)
        try:
            # What a block binds is its own to change; tensors made in the engine's inference mode are not.
            with torch.inference_mode(False):
                scope = self._scope_of(opened)
                code, namespace = scope.program(invoke.program, invoke.after)
                edits = self._edits.bind(request_id, opened, scope.arrival)
            if cached_tokens:
                raise Refusal(pb.ERROR_CODE_ENGINE, "the engine served part of a traced prompt from its prefix cache")
        except Exception as error:
            self._reject(request_id, scope, trace.id, number, _why_unbound(error))
            self.ended[request_id] = Ended.FAILED
            return
        bound = _Bound(code, namespace, prompt_tokens)
        identity = Identity(request_id, scope.id, number, gang=request.together)
        mediator = self._mediator(identity, scope, opened, bound)
        for edit in edits:
            self.scopes[edit.key] = edit.scope
            bound = _Bound(edit.code, edit.namespace, prompt_tokens)
            identity = Identity(edit.key, edit.scope.id, number, edit=edit.name, owner=request_id, rank=edit.rank)
            one = self._mediator(identity, edit.scope, opened, bound)
            self.mediators[edit.key] = self.live[edit.key] = one
        self.mediators[request_id] = self.live[request_id] = mediator
        self._writes[request_id] = list(invoke.program.writes)
        if trace.stream and self._reports:
            self.streams[request_id] = SaveStream(
                scope, invoke.program, number, self._limits, self._budget, self._outbox
            )
        self._ids[(scope.id, number)] = request_id
        for index, whole in opened.wholes.items():
            if (scope.id, index) not in self._ids:
                self._admit_whole(scope, opened, index, whole, request.together)

    def _admit_whole(self, scope: TraceScope, opened: Opened, index: int, invoke: pb.Invoke, together: int) -> None:
        """Make the mediator of an invoke without a prompt; it starts with the trace's other blocks."""
        key = _key_of(scope.id, index)
        try:
            with torch.inference_mode(False):
                code, namespace = scope.program(invoke.program, ())
        except Exception as error:
            self._reject(key, scope, scope.id, index, _why_unbound(error))
            return
        bound = _Bound(code, namespace, 0)
        identity = Identity(key, scope.id, index, gang=together, outer=True)
        mediator = self._mediator(identity, scope, opened, bound)
        self.mediators[key] = self.live[key] = mediator
        self.wholes.setdefault(scope.id, []).append(mediator)
        self._writes[key] = list(invoke.program.writes)
        self._ids[(scope.id, index)] = key

    def _mediator(self, identity: Identity, scope: TraceScope, opened: Opened, bound: _Bound) -> Mediator:
        trace = opened.trace
        state = BlockState(
            identity,
            scope.registry,
            emit=lambda text: self._outbox.log(opened.session, trace.id, identity.invoke, text),
            progress=Progress(bound.prompt_tokens),
            record=Record(Skips(self._tree)),
            fakes=Fakes() if trace.scan else None,
        )
        program = Program(bound.code, bound.namespace, scope.sources.lines, streamed=trace.stream)
        bounds = Bounds(self._budget, padded(trace.id), scope.random_state())
        return Mediator(state, GreenletRunner(state, program, self._tree, self._applier, bounds))

    def _scope_of(self, opened: Opened) -> TraceScope:
        scope = self.scopes.get(opened.trace.id)
        if scope is None:
            scope = TraceScope(
                opened.trace,
                len(opened.trace.invokes),
                opened.session,
                self._tree,
                lambda blob: self._outbox.get(opened.session, opened.trace.id, blob.id),
                self._budget,
                Codes(opened.codes),
                arrival=self._arrivals,
            )
            self._arrivals += 1
            self.scopes[scope.id] = scope
        return scope

    def _reject(self, key: str, scope: TraceScope | None, trace_id: str, invoke: int, failure: pb.Failure) -> None:
        failure.trace_id, failure.invoke = trace_id, invoke
        self._edits.forget(key)
        self._stillborn[key] = (scope, failure)
        self._ids[(trace_id, invoke)] = key

    def waits(self, request_id: str) -> list[str]:
        """Return what waits for a coming step of a request: its standing edits, then its own block, as keys of `live`.

        The request itself is among them as long as a block without a prompt sees its rows.
        """
        keys = (*self._edits.keys_of(request_id), request_id)
        return [key for key in keys if key in self.live or (self.wholes and self._seen(key))]

    def take_brought(self) -> list[str]:
        """Return the keys of the blocks without a prompt that came with new requests, whether they could be bound or not."""
        brought = sorted(self._brought)
        self._brought.clear()
        return brought

    def _seen(self, request_id: str) -> bool:
        mediator = self.mediators.get(request_id)
        return mediator is not None and any(
            one.identity.request_id in self.live for one in self.wholes.get(mediator.identity.trace_id, ())
        )

    def edits_of(self, request_id: str) -> list[Mediator]:
        """Return the standing edits that run in a request, in their order."""
        return [self.mediators[key] for key in self._edits.keys_of(request_id) if key in self.mediators]

    def leave(self, request_id: str) -> list[str]:
        """A request's block has no step more: it is served no longer. Return the names that it may give to other invokes."""
        mediator = self.mediators.pop(request_id)
        self.live.pop(request_id, None)
        if mediator.identity.outer:
            self._forget_whole(mediator)
        return self._writes.pop(request_id)

    def _forget_whole(self, mediator: Mediator) -> None:
        left = [one for one in self.wholes.pop(mediator.identity.trace_id) if one is not mediator]
        if left:
            self.wholes[mediator.identity.trace_id] = left

    def companions(self, trace_id: str) -> list[Mediator]:
        """Return the blocks of a trace's requests that start together and have not left, in the order of their invokes."""
        found = [
            one
            for one in self.mediators.values()
            if one.identity.trace_id == trace_id and one.identity.gang and not one.identity.outer
        ]
        return sorted(found, key=lambda one: one.identity.invoke)

    def rejected(self, trace_id: str) -> int:
        """Return how many of a trace's requests that are here could not be bound."""
        return sum(failure.trace_id == trace_id for _, failure in self._stillborn.values())

    def take_id(self, trace_id: str, invoke: int) -> str:
        """Return the engine's id of an invoke's request, "" if it is not here, and forget it."""
        return self._ids.pop((trace_id, invoke), "")

    def take_stillborn(self, request_id: str) -> tuple[TraceScope | None, pb.Failure] | None:
        """Return the scope of a request whose block could not be bound, and why, and forget it; None if it was bound."""
        return self._stillborn.pop(request_id, None)

    def forget_edits(self, request_id: str) -> None:
        """Drop the standing edits that ran in a request."""
        for key in self._edits.forget(request_id):
            edit = self.mediators.pop(key, None)
            self.live.pop(key, None)
            scope = self.scopes.pop(key, None)
            if edit is not None:
                edit.let_go(edit.names.clear)
            if scope is not None:
                scope.let_go()

    def drop(self, trace_id: str) -> None:
        """The trace was given up: end its blocks and forget it. Idempotent."""
        for request_id, mediator in list(self.mediators.items()):
            if mediator.identity.trace_id == trace_id:
                for edit in self.edits_of(request_id):
                    if edit.state.live:
                        edit.cancel()
                self.forget_edits(request_id)
                mediator.cancel()
                mediator.let_go(mediator.names.clear)
                self.live.pop(request_id, None)
                self.mediators.pop(request_id)
                self._writes.pop(request_id, None)
                self.streams.pop(request_id, None)
                self.ended.pop(request_id, None)
        self.wholes.pop(trace_id, None)
        for request_id, (_, failure) in list(self._stillborn.items()):
            if failure.trace_id == trace_id:
                del self._stillborn[request_id]
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


def _why_unbound(error: Exception) -> pb.Failure:
    """Return the failure of a block whose program could not be bound."""
    if isinstance(error, BindingFailed):
        return error.failure
    if isinstance(error, Refusal | WireError):
        code = error.code if isinstance(error, Refusal) else pb.ERROR_CODE_INVALID_ARGUMENT
        return pb.Failure(code=code, message=clip(str(error)))
    logger.exception("a block could not be bound", exc_info=error)
    return pb.Failure(code=pb.ERROR_CODE_ENGINE, message=f"the worker could not bind the block: {type(error).__name__}")
