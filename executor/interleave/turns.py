"""Turns of blocks: each runs with its trace's shared names, and every rank sees it end the same way.

Under tensor parallelism every rank runs the same blocks. After their turns the ranks compare how these ended, so a block
that went another way on one rank fails on all of them, before any rank waits for another. A block that wants a module
applied gets it there, where all ranks are, and has a further turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from executor.block.fingerprint import fingerprint
from executor.block.mediator import Mediator
from executor.block.scope import TraceScope
from executor.core.ended import Ended
from executor.interleave.context import Host
from executor.parallel.agreement import divergence
from interpose.v1 import trace_pb2 as pb


class Turns:
    """Lets blocks run.

    Args:
        scopes: the scopes of the traces that are here, by trace id.
        host: the worker.
        muted: a context in which no hook of the step's sees a module that is called.
    """

    def __init__(
        self,
        scopes: Mapping[str, TraceScope],
        host: Host,
        muted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._scopes = scopes
        self._applier = host.applier
        self._budget = host.budget
        self._ranks = host.ranks
        self._stages = host.stages
        self._muted = muted

    def run(self, mediator: Mediator, turn: Callable[[], None]) -> None:
        """Let a block run once, with the trace's shared names as they are now."""
        scope = self._scopes[mediator.identity.trace_id]
        gang = mediator.identity.gang > 0
        if scope.shared or gang:
            # What a name was bound to before may go, with code of its own.
            mediator.let_go(lambda: scope.share_into(mediator.names, gang))
            turn()
            mediator.let_go(lambda: scope.share_from(mediator.names, gang))
        else:
            turn()

    def agree(
        self,
        mediators: Sequence[Mediator],
        fail: Callable[[Mediator, pb.Failure], None],
        settle: Callable[[Mediator], None] | None = None,
    ) -> None:
        """Compare how the blocks' turns ended on every rank.

        Blocks that want a module applied get that first, all ranks being here with the same calls, and go on until they wait
        for something that the forward pass brings.

        Args:
            mediators: those that had a turn, the same on every rank.
            fail: called with a block that went another way elsewhere, and why it fails.
            settle: called after each further turn of one, which is at a location of the model.
        """
        turned = list(mediators)
        while turned:
            late = [int(mediator.state.progress.used > self._budget.step_seconds) for mediator in turned]
            mine = [fingerprint(mediator.state, self._ranks.several) for mediator in turned]
            everyone = self._ranks.compare(mine + late)
            applied = []
            for i, mediator in enumerate(turned):
                votes = [votes[i] for votes in everyone]
                if len(set(votes)) > 1 and mediator.state.ending.ended is not Ended.FAILED:
                    waits = mediator.state.waits
                    fail(mediator, divergence(str(waits.location or waits.call or "its end"), len(votes)))
                elif mediator.state.waits.call is not None:
                    self._apply(mediator, any(votes[len(turned) + i] for votes in everyone))
                    applied.append(mediator)
                else:
                    continue
                if settle is not None:
                    settle(mediator)
            turned = applied  # each has had a further turn

    def _apply(self, mediator: Mediator, late: bool) -> None:
        """Answer a block that wants a module applied."""
        call = mediator.state.waits.call
        assert call is not None
        if late:
            self.run(mediator, lambda: mediator.throw(self._budget.exceeded()))
            return
        started = time.monotonic()
        try:
            with self._muted():
                result = self._stages.apply(call.node, lambda: self._applier.run(call))
        except Exception as error:
            raised = error
            self.run(mediator, lambda: mediator.throw(raised))
        else:
            mediator.state.progress.used += time.monotonic() - started
            self.run(mediator, lambda: mediator.resume(result))
