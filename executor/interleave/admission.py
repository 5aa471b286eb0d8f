"""The traced requests that a worker has: their blocks, what standing edits run in them, and the traces they belong to.

A request is admitted when the engine first schedules it: its program is bound, its trace's scope made or found, and its
block becomes a mediator that waits for the first step. A program that cannot be bound leaves a failure in its place, which
the request's end reports.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import CodeType
from typing import Any

import torch

from executor.block.binding import BindingFailed
from executor.block.garbage import Garbage
from executor.block.mediator import Mediator
from executor.block.scope import TraceScope
from executor.block.watchdog import padded
from executor.core.ended import Ended
from executor.core.errors import Refusal
from executor.core.programs import Codes
from executor.core.request import Work
from executor.core.text import clip
from executor.interleave.context import Host
from executor.interleave.edits import Edits
from executor.model.meta_tensors import Fakes
from executor.saves.stream import SaveStream
from interpose.v1 import trace_pb2 as pb
from interpose.wire.encoder import WireError

logger = logging.getLogger(__name__)


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
        self._garbage = Garbage(host.budget)
        self.after_step = self._garbage.look
        self._edits = Edits(host.tree, host.budget)
        self._stillborn: dict[str, tuple[TraceScope | None, pb.Failure]] = {}
        self._writes: dict[str, list[str]] = {}
        self._ids: dict[tuple[str, int], str] = {}  # (trace id, invoke) → the engine's request id
        self._brought: set[str] = set()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self.mediators) + len(self.scopes) + len(self._stillborn) + len(self._edits)

    def admit(self, request_id: str, work: Work, prompt_tokens: int, cached_tokens: int) -> None:
        """Make the mediator of a new request; the block starts when its first step begins."""
        self._garbage.begin()
        scope: TraceScope | None = None
        invoke = work.trace.invokes[0]
        self._brought.update(_key_of(work.trace.id, index) for index in work.wholes)
        try:
            # What a block binds is its own to change; tensors made in the engine's inference mode are not.
            with torch.inference_mode(False):
                scope = self._scope_of(work)
                scope.codes.add(work.codes)
                code, namespace = scope.program(invoke.program, invoke.after)
                edits = self._edits.bind(request_id, work, scope.arrival)
            if cached_tokens:
                raise Refusal(pb.ERROR_CODE_ENGINE, "the engine served part of a traced prompt from its prefix cache")
        except Exception as error:
            self._reject(request_id, scope, work, work.invoke, _why_unbound(error))
            self.ended[request_id] = Ended.FAILED
            return
        mediator = self._mediator(request_id, scope, work, prompt_tokens, code, namespace)
        for edit in edits:
            self.scopes[edit.key] = edit.scope
            one = self._mediator(edit.key, edit.scope, work, prompt_tokens, edit.code, edit.namespace, own=False)
            one.become_edit(edit.name, request_id, edit.rank)
            self.mediators[edit.key] = self.live[edit.key] = one
        self.mediators[request_id] = self.live[request_id] = mediator
        self._writes[request_id] = list(invoke.program.writes)
        if work.trace.stream and self._reports:
            self.streams[request_id] = SaveStream(
                scope, invoke.program, work.invoke, self._limits, self._budget, self._outbox
            )
        self._ids[(scope.id, work.invoke)] = request_id
        for index, whole in work.wholes.items():
            if (scope.id, index) not in self._ids:
                self._admit_whole(scope, work, index, whole)

    def _admit_whole(self, scope: TraceScope, work: Work, index: int, invoke: pb.Invoke) -> None:
        """Make the mediator of an invoke without a prompt; it starts with the trace's other blocks."""
        key = _key_of(work.trace.id, index)
        try:
            with torch.inference_mode(False):
                code, namespace = scope.program(invoke.program, ())
        except Exception as error:
            self._reject(key, scope, work, index, _why_unbound(error))
            return
        mediator = self._mediator(key, scope, replace(work, invoke=index), 0, code, namespace, whole=True)
        self.mediators[key] = self.live[key] = mediator
        self.wholes.setdefault(scope.id, []).append(mediator)
        self._writes[key] = list(invoke.program.writes)
        self._ids[(scope.id, index)] = key

    def _mediator(
        self,
        key: str,
        scope: TraceScope,
        work: Work,
        prompt_tokens: int,
        code: CodeType,
        namespace: dict[str, Any],
        own: bool = True,
        whole: bool = False,
    ) -> Mediator:
        return Mediator(
            request_id=key,
            trace_id=scope.id,
            invoke=work.invoke,
            prompt_tokens=prompt_tokens,
            code=code,
            namespace=namespace,
            sources=scope.sources.lines,
            tree=self._tree,
            applier=self._applier,
            budget=self._budget,
            registry=scope.registry,
            emit=lambda text: self._outbox.log(work.session, work.trace.id, work.invoke, text),
            random_state=scope.random_state(),
            companions=work.together if own else 0,
            whole=whole,
            streamed=work.trace.stream,
            fakes=Fakes() if work.trace.scan else None,
            blame=padded(work.trace.id),
        )

    def _scope_of(self, work: Work) -> TraceScope:
        scope = self.scopes.get(work.trace.id)
        if scope is None:
            scope = TraceScope(
                work.trace,
                work.expected,
                work.session,
                self._tree,
                lambda blob: self._outbox.get(work.session, work.trace.id, blob.id),
                self._budget,
                Codes(),
                arrival=self._arrivals,
            )
            self._arrivals += 1
            self.scopes[scope.id] = scope
        return scope

    def _reject(self, key: str, scope: TraceScope | None, work: Work, invoke: int, failure: pb.Failure) -> None:
        failure.trace_id, failure.invoke = work.trace.id, invoke
        self._edits.forget(key)
        self._stillborn[key] = (scope, failure)
        self._ids[(work.trace.id, invoke)] = key

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
            one.request_id in self.live for one in self.wholes.get(mediator.trace_id, ())
        )

    def edits_of(self, request_id: str) -> list[Mediator]:
        """Return the standing edits that run in a request, in their order."""
        return [self.mediators[key] for key in self._edits.keys_of(request_id) if key in self.mediators]

    def leave(self, request_id: str) -> list[str]:
        """A request's block has no step more: it is served no longer. Return the names that it may give to other invokes."""
        mediator = self.mediators.pop(request_id)
        self.live.pop(request_id, None)
        if mediator.whole:
            self._forget_whole(mediator)
        return self._writes.pop(request_id)

    def _forget_whole(self, mediator: Mediator) -> None:
        left = [one for one in self.wholes.pop(mediator.trace_id) if one is not mediator]
        if left:
            self.wholes[mediator.trace_id] = left

    def companions(self, trace_id: str) -> list[Mediator]:
        """Return the blocks of a trace's requests that start together and have not left, in the order of their invokes."""
        found = [
            one for one in self.mediators.values() if one.trace_id == trace_id and one.companions and not one.whole
        ]
        return sorted(found, key=lambda one: one.invoke)

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
                edit.let_go(edit.namespace.clear)
            if scope is not None:
                scope.let_go()

    def drop(self, trace_id: str) -> None:
        """The trace was given up: end its blocks and forget it. Idempotent."""
        for request_id, mediator in list(self.mediators.items()):
            if mediator.trace_id == trace_id:
                for edit in self.edits_of(request_id):
                    if edit.live:
                        edit.cancel()
                self.forget_edits(request_id)
                mediator.cancel()
                mediator.let_go(mediator.namespace.clear)
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
        scope = self.scopes.pop(trace_id, None)
        self._outbox.forget(trace_id)
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
