"""Takes in the traces of tenants without trust, whose blocks run in sandboxed processes."""

from __future__ import annotations

from executor.block.identity import Identity
from executor.block.mediator import Mediator
from executor.block.state import BlockState, Progress, Record
from executor.core.errors import Refusal
from executor.core.request import Opened
from executor.interleave.context import Host
from executor.model.skips import Skips
from executor.sandbox.runner import SandboxRunner
from executor.sandbox.trace import SandboxedTrace, Terms, why_not_there
from interpose.v1 import trace_pb2 as pb

WHY = "the tenant's blocks run in a sandbox"


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

    def takes(self, opened: Opened) -> bool:
        """Return whether the blocks of a trace run in a sandbox."""
        return self._host.sandboxes is not None and not opened.trusted

    def admit(
        self, opened: Opened, request_id: str, prompt_tokens: int, arrival: int
    ) -> tuple[SandboxedTrace, Mediator]:
        """Bind a trace's block in a process of its own.

        Raises:
            Refusal: the trace does what a sandbox does not do yet, there is no process, or a value cannot be bound.
        """
        host, trace = self._host, opened.trace
        reason = why_not_there(opened) or (
            "models over several ranks" if host.ranks.several or host.stages.last else ""
        )
        if reason:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"blocks of tenants without trust run in a sandbox, where there is no support yet for {reason}",
            )
        assert host.sandboxes is not None
        scope = SandboxedTrace(opened, host.sandboxes.take(), self._terms, arrival)
        try:
            scope.begin(request_id, prompt_tokens)
        except BaseException:
            scope.end()
            raise
        state = BlockState(
            Identity(request_id, trace.id, 0),
            scope.registry,
            emit=lambda text: host.outbox.log(opened.session, trace.id, 0, text),
            progress=Progress(prompt_tokens),
            record=Record(Skips(host.tree)),
        )
        state.record.tally.why = WHY
        return scope, Mediator(state, SandboxRunner(state, scope, host.tree, host.applier))
