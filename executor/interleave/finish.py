"""The end of a request: its block runs to its end, and what it saved, how it failed and what it did become events."""

from __future__ import annotations

from collections.abc import Callable

from executor.block.mediator import Mediator
from executor.block.scope import TraceScope
from executor.core.ended import Ended, Ending
from executor.core.errors import BudgetExceeded
from executor.interleave.admission import Requests
from executor.interleave.context import Host
from executor.model.meta_tensors import explained
from executor.saves.collect import collect
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb


class Endings:
    """Ends the requests of one worker.

    Args:
        requests: the requests that are here.
        end: lets a block run to its end, with what the engine generated.
        host: the worker.
    """

    def __init__(
        self,
        requests: Requests,
        end: Callable[[Mediator, Result | list[Result]], None],
        host: Host,
    ) -> None:
        self._requests = requests
        self._end = end
        self._outbox = host.outbox
        self._budget = host.budget
        self._limits = host.limits
        self._reports = host.reports
        self._precision = host.precision

    def finish(self, trace_id: str, invoke: int, result: Result | list[Result]) -> Ending:
        """The engine finished an invoke's request: end its block, and send what it saved.

        Args:
            result: what the engine generated; for an invoke without a prompt, what it generated for each of the others.

        Returns:
            How the block ended (`Ended.UNKNOWN` if it is not here), events for the client (Saves,
            Failed, Accounting), serialized, and how many times the block printed.
        """
        request_id = self._requests.take_id(trace_id, invoke)
        stillborn = self._requests.take_stillborn(request_id)
        if stillborn is not None:
            unbound, failure = stillborn
            return Ended.FAILED, self._close(trace_id, unbound, invoke, [pb.Event(failed=failure)]), 0
        mediator = self._requests.mediators.get(request_id)
        if mediator is None:
            return Ended.UNKNOWN, [], 0
        self._finish_edits(mediator, result)
        writes = self._requests.leave(request_id)
        scope = self._requests.scopes[mediator.identity.trace_id]
        stream = self._requests.streams.pop(request_id, None)
        steps = mediator.state.steps
        self._end(mediator, result)
        self._requests.ended.pop(request_id, None)
        events: list[pb.Event] = []
        failed = mediator.state.ending.failure
        if failed is not None and mediator.state.fakes is not None:
            failed = explained(failed)
        if stream is not None:
            events = [stream.end(mediator.names, mediator.state.steps)]
            failed = failed or stream.failure
        if failed is None:
            if scope.expected > 1:
                scope.export(mediator.identity.invoke, mediator.names, writes)
            if self._reports and stream is None:
                events = self._bounded(
                    scope,
                    mediator.identity.invoke,
                    mediator.state.progress.used,
                    # Its values are named nowhere else, or they could not go with the block.
                    lambda put: collect(scope, mediator.identity.invoke, mediator.bound(writes), {}, self._limits, put),
                )
        mediator.let_go(lambda: scope.leave(mediator.names, mediator.lends_names))
        if failed is None and mediator.state.ending.failure is not None:  # an object that it let go of ran too long
            failed = mediator.state.ending.failure
            events = [event for event in events if event.WhichOneof("kind") == "increment"]
        if failed is not None:
            events.append(pb.Event(failed=failed))
        if self._reports:
            generated = sum(len(one.token_ids) for one in (result if isinstance(result, list) else [result]))
            accounting = mediator.state.record.tally.accounting(
                invoke, steps, mediator.state.progress.prompt_tokens, generated, self._precision
            )
            events.append(pb.Event(accounting=accounting))
        return (
            Ended.FAILED if failed is not None or mediator.state.ending.ended is None else mediator.state.ending.ended,
            self._close(trace_id, scope, invoke, events),
            mediator.state.record.logs,
        )

    def _finish_edits(self, mediator: Mediator, result: Result | list[Result]) -> None:
        """End the standing edits of a request; one that fails now fails it."""
        for edit in self._requests.edits_of(mediator.identity.request_id):
            if edit.state.live and mediator.state.ending.ended in (Ended.STOPPED, Ended.FAILED):
                edit.cancel()
            self._end(edit, result)
            mediator.state.record.logs += edit.state.record.logs
        self._requests.forget_edits(mediator.identity.request_id)

    def _bounded(
        self, scope: TraceScope, invoke: int, used: float, encode: Callable[[Callable[..., object]], list[pb.Event]]
    ) -> list[pb.Event]:
        """Encode what was saved within the budget of the block that saved it: its objects have code of their own.

        Args:
            invoke: the invoke, -1 for the shared values.
            used: seconds that the block has used in this step already.
            encode: given what takes blobs, returns the events.
        """
        blobs: list[tuple[str, memoryview]] = []
        try:
            events, _ = self._budget.run(lambda: encode(lambda *blob: blobs.append(blob)), used, scope.blame)
        except BudgetExceeded as error:
            message = f"while what was saved was encoded, {error.message}"
            return [pb.Event(failed=pb.Failure(code=error.code, message=message, trace_id=scope.id, invoke=invoke))]
        if any(event.WhichOneof("kind") == "saves" for event in events):
            for blob_id, data in blobs:
                self._outbox.put(scope.session, scope.id, blob_id, data)
        return events

    def _close(self, trace_id: str, scope: TraceScope | None, invoke: int, events: list[pb.Event]) -> list[bytes]:
        """Note that an invoke has ended; after the last one send the shared values and drop the scope."""
        if self._requests.close(trace_id, invoke) and scope is not None:
            if self._reports:
                shared = self._bounded(
                    scope, -1, 0.0, lambda put: collect(scope, -1, *scope.changed(), self._limits, put)
                )
                events = events + shared
            late = scope.let_go()
            if late is not None:
                failed = pb.Failure(code=late.code, message=late.message, trace_id=scope.id, invoke=invoke)
                kept = [event for event in events if event.WhichOneof("kind") not in ("saves", "failed")]
                events = [*kept, pb.Event(failed=failed)]
        self._requests.look_idle()
        return [event.SerializeToString() for event in events]
