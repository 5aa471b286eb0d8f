"""The end of a request: its saves, its failure and its accounting become events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor.block.mediator import Mediator
from executor.block.scope import Scope, Sent
from executor.core.ended import Ended, Ending
from executor.interleave.admission import Requests
from executor.interleave.context import Host
from executor.interleave.machine.events import TurnEnded
from executor.interleave.machine.instructions import Close, Finish, Forget, Instruction
from executor.interleave.running import Running
from executor.model.meta_tensors import explained
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb


class Endings:
    """Ends the requests of one worker, as the machine says.

    Args:
        requests: the requests that are here.
        running: lets blocks run.
        host: the worker.
    """

    def __init__(self, requests: Requests, running: Running, host: Host) -> None:
        self._requests = requests
        self._running = running
        self._outbox = host.outbox
        self._budget = host.budget
        self._limits = host.limits
        self._reports = host.reports
        self._precision = host.precision
        self._trace_id, self._invoke = "", 0
        self._result: Result | list[Result] = []
        self._steps = 0
        self._edit_logs = 0
        self._ending: Ending = Ended.UNKNOWN, [], 0

    def handlers(self) -> dict[type[Instruction], Callable[[Any], Any]]:
        """Return what carries out each instruction, by its type."""
        return {Finish: self._finish, Forget: self._forget, Close: self._close}

    def begin(self, key: str, trace_id: str, invoke: int, result: Result | list[Result]) -> None:
        """The engine finished a request.

        Args:
            key: the request, or a joint block.
            trace_id, invoke: the invoke.
            result: as of `Interleaver.finish`.
        """
        self._trace_id, self._invoke, self._result = trace_id, invoke, result
        mediator = self._requests.mediators.get(key)
        self._steps = mediator.state.steps if mediator is not None else 0
        self._edit_logs = 0

    def take(self) -> Ending:
        """Return how the block ended that was closed last."""
        ending, self._ending = self._ending, (Ended.UNKNOWN, [], 0)
        return ending

    def _finish(self, do: Finish) -> TurnEnded:
        """Let a block run to its end."""
        mediator = self._requests.mediators[do.block]
        self._budget.begin_step()
        if isinstance(self._result, Result):
            mediator.state.progress.step = max(mediator.state.progress.step, len(self._result.token_ids) - 1)
        return self._running.turn(mediator, lambda: mediator.finish(self._result))

    def _forget(self, do: Forget) -> None:
        self._edit_logs += self._requests.forget(do.block)

    def _close(self, do: Close) -> None:
        """Send what a block saved or why it failed, and drop its names."""
        unbound = self._requests.take_stillborn(do.block)
        if unbound is not None:
            scope, failure = unbound
            self._ending = Ended.FAILED, self._leave(scope, [pb.Event(failed=failure)]), 0
            return
        mediator, writes, stream = self._requests.leave(do.block)
        scope = self._requests.scopes[mediator.identity.trace_id]
        events: list[pb.Event] = []
        failed = mediator.state.ending.failure
        if failed is not None and mediator.state.fakes is not None:
            failed = explained(failed)
        explains = mediator.state.record.explains
        if explains is not None and failed is not None and explains.excuses(failed):
            failed = mediator.state.ending.failure = None
        if stream is not None:
            events = [stream.end(mediator.names, mediator.state.steps)]
            failed = failed or stream.failure
        if failed is None:
            if scope.expected > 1:
                scope.shared.export(mediator.identity.invoke, mediator.names, writes)
            if self._reports and stream is None and explains is None:
                events = self._saves(mediator, scope, writes)
        mediator.let_go(lambda: scope.leave(mediator.names, mediator.lends_names))
        if failed is None and mediator.state.ending.failure is not None:  # an object that it let go of ran too long
            failed = mediator.state.ending.failure
            events = [event for event in events if event.WhichOneof("kind") == "increment"]
        if failed is not None:
            events.append(pb.Event(failed=failed))
        if self._reports and explains is not None:
            events.append(pb.Event(explanation=explains.explanation()))
        if self._reports:
            events.append(pb.Event(accounting=self._accounting(mediator)))
        self._ending = (
            Ended.FAILED if failed is not None or mediator.state.ending.ended is None else mediator.state.ending.ended,
            self._leave(scope, events),
            mediator.state.record.logs + self._edit_logs,
        )

    def _saves(self, mediator: Mediator, scope: Scope, writes: list[str]) -> list[pb.Event]:
        """Return what a block saved.

        The values are named nowhere else afterwards, or they could not go with the block.
        """
        used = mediator.state.progress.used
        saved = scope.saved(mediator.identity.invoke, mediator.bound(writes), used, self._limits)
        return self._put(scope, saved)

    def _put(self, scope: Scope, sent: Sent) -> list[pb.Event]:
        """Send the blobs; return the events."""
        events, blobs = sent
        for blob_id, data in blobs:
            self._outbox.put(scope.session, scope.id, blob_id, data)
        return events

    def _accounting(self, mediator: Mediator) -> pb.Accounting:
        results = self._result if isinstance(self._result, list) else [self._result]
        generated = sum(len(result.token_ids) for result in results)
        progress = mediator.state.progress
        return mediator.state.record.tally.accounting(
            self._invoke,
            self._steps,
            progress.prompt_tokens,
            generated,
            self._precision,
            progress.before + progress.used,
        )

    def _leave(self, scope: Scope | None, events: list[pb.Event]) -> list[bytes]:
        """End the invoke; after the last one of a trace send the shared values and drop the scope."""
        if self._requests.close(self._trace_id, self._invoke) and scope is not None:
            if self._reports:
                events = events + self._put(scope, scope.given_back(self._limits))
            left = scope.let_go()
            if left is not None:
                failed = pb.Failure(code=left.code, message=left.message, trace_id=scope.id, invoke=self._invoke)
                kept = [event for event in events if event.WhichOneof("kind") not in ("saves", "failed")]
                events = [*kept, pb.Event(failed=failed)]
        self._requests.look_idle()
        return [event.SerializeToString() for event in events]
