"""Takes in the traces of tenants without trust, whose blocks run in sandboxed processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from executor.block.identity import Identity
from executor.block.mediator import Mediator
from executor.block.state import BlockState, Progress, Record
from executor.core.errors import Refusal
from executor.core.request import InvokeRequest, Opened
from executor.interleave.context import Host
from executor.model.meta_tensors import Fakes, needs_elements
from executor.model.skips import Skips
from executor.plan.portable import make_ready
from executor.sandbox.errors import made_of, told_of
from executor.sandbox.planned import Room
from executor.sandbox.process import Process
from executor.sandbox.runner import SandboxRunner
from executor.sandbox.standing import SandboxedEdit
from executor.sandbox.stream import Stream
from executor.sandbox.trace import SandboxedTrace, Terms
from interpose.v1 import trace_pb2 as pb

_MOST_PLAN_BYTES = 512 << 20  # of the plans of all sandboxed blocks
WHY = "the tenant's blocks run in a sandbox"


@dataclass(frozen=True)
class Explained:
    """The explanation of a sandboxed block: all of it is of the tier "block".

    Attributes:
        invoke: the block's invoke.
        line: its first line in the notebook.
    """

    invoke: int
    line: int

    def explanation(self) -> pb.Explanation:
        """Return the one part that the block is."""
        part = pb.ExplainedPart(line=self.line, tier="block", why=WHY)
        return pb.Explanation(invoke=self.invoke, parts=[part], notes=[WHY])

    def excuses(self, failure: pb.Failure) -> bool:
        """Return whether the block failed because an explanation runs on shapes."""
        return needs_elements(failure)


@dataclass
class Taken:
    """The blocks of one new request.

    Attributes:
        edits: its standing edits, in the order of their turns, each with its scope.
        own: its own block; None if it could not be bound.
        joint: the joint blocks that came with the request.
        failures: why blocks could not be bound, by key.
        stream: sends what the request's block saves, of a streamed trace.
    """

    edits: list[tuple[Mediator, SandboxedEdit]] = field(default_factory=list)
    own: Mediator | None = None
    joint: list[Mediator] = field(default_factory=list)
    failures: dict[str, pb.Failure] = field(default_factory=dict)
    stream: Stream | None = None


class Sandboxed:
    """The sandboxed traces of one worker.

    Args:
        host: the worker.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        outbox = host.outbox
        self._terms = Terms(
            host.budget.step_seconds, host.budget.memory_bytes, host.limits, outbox.get, outbox.increment, outbox.put
        )
        # Over pipeline stages a location may be in another stage's part.
        plans = host.sandboxes is not None and host.sandbox_plans and host.stages.last == 0
        self._room = Room(_MOST_PLAN_BYTES) if plans else None
        if plans:
            make_ready()

    def takes(self, opened: Opened) -> bool:
        """Return whether the blocks of a trace run in a sandbox."""
        return self._host.sandboxes is not None and not opened.trusted

    def open(self, opened: Opened, arrival: int) -> SandboxedTrace:
        """Return the scope of a trace, with a process of its own.

        Raises:
            Refusal: there is no process.
        """
        host = self._host
        assert host.sandboxes is not None
        process: Process | None = None
        outcome: Any = None
        if host.reports:  # this rank has the processes
            try:
                process = host.sandboxes.take(promised=not opened.trace.scan)
            except Refusal as error:
                outcome = told_of(error)
        outcome = host.ranks.share(outcome)
        if outcome is not None:
            raise made_of(outcome)
        return SandboxedTrace(opened, process, host.ranks, self._terms, arrival)

    def admit(
        self,
        scope: SandboxedTrace,
        opened: Opened,
        request_id: str,
        request: InvokeRequest,
        prompt_tokens: int,
        joint: dict[int, str],
    ) -> Taken:
        """Bind the blocks of a new request in the process of its trace.

        Args:
            scope: the trace's.
            opened: the trace.
            request_id: the engine's id of the request.
            request: the request.
            prompt_tokens: the length of the prompt.
            joint: the keys of the joint blocks that are bound with it, by invoke.
        """
        taken, trace = Taken(), opened.trace
        asked = [(request_id, request.invoke, prompt_tokens), *((key, index, 0) for index, key in joint.items())]
        scope.keys.update({invoke: key for key, invoke, _ in asked})
        taken.failures = scope.begin(
            [
                {
                    "key": key,
                    "invoke": invoke,
                    "prompt_tokens": tokens,
                    "gang": request.gang,
                    "joint": key != request_id,
                }
                for key, invoke, tokens in asked
            ]
        )
        if request_id not in taken.failures:
            for number, edit in enumerate(trace.applied):
                key, rank = f"{request_id}#{number}", number - len(trace.applied)
                of = Identity(key, key, request.invoke, edit=edit.name, owner=request_id, rank=rank)
                mediator = self._mediator(of, scope, opened, prompt_tokens)
                taken.edits.append((mediator, SandboxedEdit(key, scope)))
            identity = Identity(request_id, trace.id, request.invoke, gang=request.gang)
            taken.own = self._mediator(identity, scope, opened, prompt_tokens)
            if trace.stream and self._host.reports:
                taken.stream = Stream(scope, taken.own.state)
        for index, key in joint.items():
            if key not in taken.failures:
                identity = Identity(key, trace.id, index, gang=request.gang, joint=True)
                taken.joint.append(self._mediator(identity, scope, opened, 0))
        return taken

    def _mediator(self, identity: Identity, scope: SandboxedTrace, opened: Opened, prompt_tokens: int) -> Mediator:
        host, invoke, trace = self._host, identity.invoke, opened.trace
        state = BlockState(
            identity,
            scope.registry,
            emit=lambda text: not trace.explain and host.outbox.log(opened.session, trace.id, invoke, text),
            progress=Progress(prompt_tokens),
            record=Record(Skips(host.tree)),
            fakes=Fakes() if trace.scan else None,
        )
        state.record.tally.why = WHY
        if trace.explain and not identity.edit:
            state.record.explains = Explained(invoke, trace.invokes[invoke].program.first_line)
        own = not (identity.edit or identity.joint or identity.gang)
        plain = own and not (trace.stream or trace.scan or trace.explain)
        return Mediator(state, SandboxRunner(state, scope, host.tree, host.applier, self._room if plain else None))
