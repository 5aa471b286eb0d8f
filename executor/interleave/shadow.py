"""A shadow of a block: the block's code once more, for its changes alone.

What a shadow saves is dropped, and what it prints is not sent. Its names are its own: they are bound anew from the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from executor.block.api import Program
from executor.block.greenlet_runner import Bounds, GreenletRunner
from executor.block.identity import Identity
from executor.block.mediator import Mediator
from executor.block.scope import TraceScope
from executor.block.state import BlockState, Progress, Record
from executor.block.uploads import Uploads
from executor.block.watchdog import padded
from executor.core.location import Kind, Location
from executor.core.programs import Codes
from executor.core.request import Opened
from executor.interleave.context import Host
from executor.model.call import Call
from executor.model.meta_tensors import Fakes
from executor.model.skips import Skips
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb


class Shadow:
    """A copy of one block that runs in the step of a prompt.

    Args:
        host: the worker.
        opened: the trace.
        request_id, invoke: which block it is a copy of.
        tokens: the length of the prompt.
        muted: a context in which no hook of a step sees a module that is called.
        fakes: makes the tensors of a block that is followed on shapes; None: the block sees values.
        around: makes a context for each turn.

    Attributes:
        mediator: drives the copy.
        applied: whether the copy has applied a module to values.
    """

    def __init__(
        self,
        host: Host,
        opened: Opened,
        request_id: str,
        invoke: int,
        tokens: int,
        muted: Callable[[], AbstractContextManager[object]],
        fakes: Fakes | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        trace = opened.trace
        uploads = Uploads(
            lambda blob: host.outbox.get(opened.session, trace.id, blob.id), opened.tenant, host.constants
        )
        scope = TraceScope(
            trace, len(trace.invokes), opened.session, host.tree, uploads, host.budget, Codes(opened.codes)
        )
        self.applied = False
        self._scope = scope
        self._host = host
        self._muted = muted
        self._around = around
        identity = Identity(request_id, trace.id, invoke)
        state = BlockState(
            identity, scope.registry, lambda text: False, Progress(tokens), Record(Skips(host.tree)), fakes=fakes
        )
        code, names = scope.program(trace.invokes[invoke].program, ())
        program = Program(code, names, scope.sources.lines)
        bounds = Bounds(host.budget, padded(trace.id), scope.random_state())
        with around():  # a block may not wait in another torch mode than the mode in which it was made
            self.mediator = Mediator(state, GreenletRunner(state, program, host.tree, host.applier, bounds))

    @property
    def waits(self) -> Location | None:
        """What the copy waits for in the prompt's step; None: nothing."""
        at = self.mediator.state.waits.location
        return at if at is not None and at.step == 0 and at.kind in (Kind.INPUT, Kind.OUTPUT, Kind.PATTERN) else None

    def waits_at(self, path: str, kind: str) -> bool:
        """Return whether the copy waits for a location."""
        at = self.waits
        return at is not None and (at.path, str(at.kind)) == (path, str(kind))

    @property
    def failure(self) -> pb.Failure | None:
        """Why the copy failed, if it did."""
        return self.mediator.state.ending.failure

    @property
    def sources(self) -> dict[str, dict[int, str]]:
        """The lines of the block's text."""
        return self._scope.sources.lines

    def start(self) -> None:
        """Run the copy up to the first location that it asks for."""
        self.mediator.begin_step()
        self._turn(self.mediator.start)

    def serve(self, served: Served, position: int) -> None:
        """Give the copy what it waits for."""
        at = self.waits
        assert at is not None
        self._turn(lambda: self.mediator.serve(served, at, position))

    def _turn(self, turn: Callable[[], None]) -> None:
        """Let the copy run until it waits for a location or ends; modules that it applies are run."""
        with self._around():
            turn()
        state = self.mediator.state
        while (call := state.waits.call) is not None and state.ending.ended is None:
            self.applied |= call.wanted is None
            answer, value = self._answered(call)
            with self._around():
                answer(value)

    def _answered(self, call: Call) -> tuple[Callable[[Any], None], Any]:
        """Run a module that the copy applies; return what goes on with the copy, and with what."""
        try:
            with self._muted():
                return self.mediator.resume, self._host.applier.run(call)
        except Exception as error:
            return self.mediator.throw, error

    def end(self) -> None:
        """End the copy, and drop its names."""
        if self.mediator.state.live:
            self.mediator.cancel()
        self.mediator.let_go(self.mediator.names.clear)
        self._scope.let_go()
