"""A sandboxed process: it runs the blocks of one trace.

It has nothing but a socket and the memory that it shares with its worker. The blocks run as they would in the worker, as
greenlets with the same names, bounds and errors (`executor.block`); the names that they share pass between them here. What
differs is where a value comes from and where it goes: a location's rows come as bytes, the changed rows and what a block saves
leave as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from executor.block.api import Program
from executor.block.binding import BindingFailed
from executor.block.edits import BoundEdit, Edits
from executor.block.greenlet_runner import Bounds, GreenletRunner
from executor.block.identity import Identity
from executor.block.mediator import Mediator
from executor.block.scope import Sent, TraceScope
from executor.block.state import BlockState, Progress, Record
from executor.block.uploads import Uploads
from executor.block.watchdog import padded
from executor.core.errors import Refusal
from executor.core.programs import Codes, Unit
from executor.core.request import Opened
from executor.core.text import clip
from executor.model.meta_tensors import Fakes
from executor.model.tree import ModuleTree
from executor.plan.apart import why_not_planned
from executor.sandbox.channel import ChildEnd, Kind
from executor.sandbox.errors import made_of
from executor.sandbox.hosted import HostedBlock
from executor.sandbox.planner import Planner, Text
from executor.sandbox.stand_ins import FarApplier, OwnBudget, SandboxedBlock, ToldSkips, ToWorker, fetched
from executor.saves.collect import Limits
from executor.saves.stream import SaveStream
from executor.views.experts import route_by
from interpose.v1 import trace_pb2 as pb
from interpose.wire.encoder import WireError

_MOST_LOG = 1 << 20  # characters: the way out cuts a trace's text there, with a note
_CHUNK = 64 << 10  # characters of a text that travel at a time
_ENCODING = (Kind.SAVES, Kind.SHARED, Kind.STREAM)


class Child:
    """One trace's blocks, and what the worker asks of them.

    Args:
        end: the channel.
        tree: the skeleton of the model's modules.
        widths: of the model's values, as of `Parameters`.
    """

    def __init__(self, end: ChildEnd, tree: ModuleTree, widths: tuple[int, int]) -> None:
        self._end = end
        self._tree = tree
        self._widths = widths
        self._outbox: Any = ToWorker(end)
        self._opened: Opened
        self._scope: TraceScope
        self._limits: Limits
        self._budget: OwnBudget
        self._applier: Any
        self._edits: Edits
        self._blocks: dict[str, HostedBlock] = {}
        self._logged = 0
        self._now = (-1, False)  # the step, and whether the generation is over, of the turn before
        self._do: dict[Kind, Callable[[dict[str, Any]], dict[str, Any]]] = {
            Kind.OPEN: self._open,
            Kind.START: lambda told: self._turn(told, lambda block: block.turn(told, block.mediator.start)),
            Kind.SERVE: lambda told: self._turn(told, lambda block: block.serve(told)),
            Kind.RESUME: lambda told: self._turn(told, lambda block: block.resume(told)),
            Kind.THROW: lambda told: self._turn(told, lambda block: self._throw(block, told)),
            Kind.SETTLE: lambda told: self._blocks[told["block"]].settle(told),
            Kind.RECORD: lambda told: self._blocks[told["block"]].record(told),
            Kind.CANCEL: lambda told: self._blocks[told["block"]].cancel(told),
            Kind.LEAVE: self._leave,
            Kind.PLAN: lambda told: self._blocks[told["block"]].plan(told),
            Kind.LAND: lambda told: self._blocks[told["block"]].land(told),
            Kind.SAVES: self._saves,
            Kind.SHARED: lambda told: self._sent(self._scope.given_back(self._limits)),
            Kind.STREAM: self._increment,
        }

    def run(self) -> NoReturn:
        """Answer the worker's questions until the worker is gone."""
        route_by(self._routed)
        with torch.inference_mode():
            while True:
                kind, told = self._end.next()
                try:
                    self._end.send(Kind.ANSWER, self.answer(kind, told))
                except Refusal as error:  # there is no room for the answer, or it cannot travel
                    self._end.send(Kind.ANSWER, self._instead(kind, told, error))

    def answer(self, kind: Kind, told: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a question of the worker's."""
        return self._do[kind](told)

    def _instead(self, kind: Kind, told: dict[str, Any], error: Refusal) -> dict[str, Any]:
        """Return the answer in place of an answer that cannot travel."""
        if kind is Kind.SHARED:
            failure = pb.Failure(code=error.code, message=clip(error.message))
            return {"events": [pb.Event(failed=failure).SerializeToString()]}
        block = self._blocks[told["block"]]
        failure = block.failure_of(error)
        if kind is Kind.STREAM:
            return {"events": [], "failure": failure.SerializeToString(), "on": False}
        if kind is Kind.SAVES:
            return {"events": [pb.Event(failed=failure).SerializeToString()]}
        block.mediator.fail(failure)
        return block.answer()

    # The trace.

    def _open(self, told: dict[str, Any]) -> dict[str, Any]:
        """Bind blocks of the trace; the first time, with the trace.

        Returns:
            Whether the trace's scope is made, and why blocks could not be bound, by key.
        """
        failures: dict[str, bytes] = {}
        for asked in told["blocks"]:
            try:
                with torch.inference_mode(False):
                    if told["trace"] is not None:
                        self._begin(told)
                        told["trace"] = None
                    self._bind(asked)
            except Exception as error:
                failures[asked["key"]] = _why_unbound(error).SerializeToString()
        return {"opened": told["trace"] is None, "failures": failures}

    def _begin(self, told: dict[str, Any]) -> None:
        """Make the trace's scope."""
        trace = pb.Trace.FromString(told["trace"])
        self._opened = Opened(trace, "", told["codes"])
        self._limits = Limits(told["inline_bytes"], told["max_saved_bytes"])
        self._applier = FarApplier(told["memory_bytes"], self._widths)
        self._budget = OwnBudget(told["step_seconds"], told["memory_bytes"])
        self._budget.begin_step()
        self._edits = Edits(self._tree, self._budget)
        uploads = Uploads(lambda blob: fetched(self._end, blob.id, made_of))
        expected = len(trace.invokes)
        self._scope = TraceScope(trace, expected, "", self._tree, uploads, self._budget, Codes(told["codes"]))

    def _bind(self, asked: dict[str, Any]) -> None:
        """Bind a block, after the standing edits of its request."""
        trace, number, key = self._opened.trace, asked["invoke"], asked["key"]
        invoke, joint = trace.invokes[number], asked["joint"]
        code, names = self._scope.program(invoke.program, () if joint else invoke.after)
        edits: Iterable[BoundEdit] = () if joint else self._edits.bind(key, self._opened, 0)
        for edit in edits:
            of = Identity(edit.key, edit.scope.id, number, edit=edit.name, owner=key, rank=edit.rank)
            bound = Program(edit.code, edit.namespace, edit.scope.sources.lines)
            self._host(of, edit.scope, bound, asked["prompt_tokens"], [])
        identity = Identity(key, trace.id, number, gang=asked["gang"], joint=joint)
        program = Program(code, names, self._scope.sources.lines, streamed=trace.stream)
        block = self._host(identity, self._scope, program, asked["prompt_tokens"], list(invoke.program.writes))
        if not joint:
            self._plan(block, invoke.program, trace)
        if trace.stream and not joint:
            block.stream = SaveStream(self._scope, invoke.program, number, self._limits, self._budget, self._outbox)

    def _plan(self, block: HostedBlock, program: pb.Program, trace: pb.Trace) -> None:
        """Let steps of a block become plans, if they may."""
        names = frozenset(program.writes)
        shared = frozenset(name for name in names if name in self._scope.shared)
        draws = self._scope.random_state() is not None
        identity = block.mediator.identity
        why = why_not_planned(trace, bool(identity.edit), bool(identity.joint or identity.gang), draws)
        text = Text(Unit.of_block(program), self._scope.sources.lines, names, shared, why)
        block.planner = Planner(block.mediator.state, block.runner, self._tree, text)

    def _host(
        self, identity: Identity, scope: TraceScope, program: Program, prompt_tokens: int, writes: list[str]
    ) -> HostedBlock:
        key, trace = identity.request_id, self._opened.trace
        state = BlockState(
            identity,
            scope.registry,
            emit=lambda text: self._emit(key, text),
            progress=Progress(prompt_tokens),
            record=Record(ToldSkips(self._tree)),
            fakes=Fakes() if trace.scan else None,
        )
        bounds = Bounds(self._budget, padded(trace.id), scope.random_state())
        runner = GreenletRunner(state, program, self._tree, self._applier, bounds, SandboxedBlock)
        block = self._blocks[key] = HostedBlock(Mediator(state, runner), runner, scope, writes)
        return block

    def _emit(self, key: str, text: str) -> bool:
        """Send printed text; return whether the trace may print more."""
        if self._logged > _MOST_LOG:
            return False
        text = text[: _MOST_LOG + 1 - self._logged]
        self._logged += len(text)
        for first in range(0, len(text), _CHUNK):  # no notice of no text
            self._end.send(Kind.LOG, (key, text[first : first + _CHUNK]))
        return True

    def _routed(self, layer: str, item: int, logits: torch.Tensor) -> torch.Tensor:  # -> [rows, chosen experts]
        """Return which experts a router of the worker's model chooses."""
        self._end.send(Kind.CHOOSE, (layer, item, logits))
        _, told = self._end.next()
        if told["error"] is not None:
            raise made_of(told["error"])
        chosen: torch.Tensor = told["chosen"]
        return chosen

    # Turns.

    def _turn(self, told: dict[str, Any], turn: Callable[[HostedBlock], dict[str, Any]]) -> dict[str, Any]:
        now = told["step"], told["finished"]
        if now != self._now:
            self._budget.begin_step()
            self._now = now
        return turn(self._blocks[told["block"]])

    def _throw(self, block: HostedBlock, told: dict[str, Any]) -> dict[str, Any]:
        return block.turn(told, lambda: block.mediator.throw(made_of(told["error"])))

    def _leave(self, told: dict[str, Any]) -> dict[str, Any]:
        """Drop a block that has ended."""
        block = self._blocks.pop(told["block"])
        if told["export"]:
            block.export()
        failure = block.leave()
        return {"failure": None if failure is None else failure.SerializeToString()}

    # What a block saved.

    def _saves(self, told: dict[str, Any]) -> dict[str, Any]:
        block = self._blocks[told["block"]]
        if told["export"]:
            block.export()
        mediator = block.mediator
        names = mediator.bound(block.writes)
        used = mediator.state.progress.used
        return self._sent(self._scope.saved(mediator.identity.invoke, names, used, self._limits))

    def _sent(self, sent: Sent) -> dict[str, Any]:
        events, blobs = sent
        for blob_id, data in blobs:
            self._outbox.put("", "", blob_id, data)
        return {"events": [event.SerializeToString() for event in events]}

    def _increment(self, told: dict[str, Any]) -> dict[str, Any]:
        """Send what is new of a streamed trace; the last increment is in the answer."""
        block = self._blocks[told["block"]]
        stream, names = block.stream, block.mediator.names
        assert stream is not None
        events, on = [], True
        if told["final"]:
            events = [stream.end(names, told["steps"]).SerializeToString()]
        else:
            on = stream.step(names, told["steps"], told["last"])
        failure = None if stream.failure is None else stream.failure.SerializeToString()
        return {"events": events, "failure": failure, "on": on}


def _why_unbound(error: Exception) -> pb.Failure:
    """Return the failure of a block whose names could not be bound."""
    if isinstance(error, BindingFailed):
        return error.failure
    code = error.code if isinstance(error, Refusal) else pb.ERROR_CODE_INVALID_ARGUMENT
    said = str(error) if isinstance(error, Refusal | WireError) else f"{type(error).__name__}: {error}"
    return pb.Failure(code=code, message=clip(said))
