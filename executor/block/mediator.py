"""The forward's side of one block: it moves the block's state on, and drives its runner.

A block waits at one location at a time. The interleaver resumes the block there with the served value, and the runner lets the
block run until it asks for another location. The mediator and the runner share the block's state (`executor.block.state`). They
take strict turns, so nothing needs a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from executor.block.barrier import Barrier
from executor.block.identity import Identity
from executor.block.runner import Runner
from executor.block.state import BlockState
from executor.core.ended import Ended
from executor.core.location import Location
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb


class Mediator:
    """Drives one block.

    Args:
        state: the block's state.
        runner: runs the block's code.

    Attributes:
        state: as given.
        identity: which block it is.
    """

    def __init__(self, state: BlockState, runner: Runner) -> None:
        self.state = state
        self.identity: Identity = state.identity
        self._runner = runner

    @property
    def names(self) -> MutableMapping[str, Any]:
        """The block's names."""
        return self._runner.names

    @property
    def lends_names(self) -> bool:
        """Whether other blocks may call the block's functions after the block has ended.

        These functions use the block's names.
        """
        return self._runner.lends_names

    @property
    def may_start_early(self) -> bool:
        """Whether the block may start before its first step."""
        return self._runner.may_start_early

    def bound(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the names that are bound, with what they are bound to."""
        mine = self._runner.names
        return {name: mine[name] for name in names if name in mine}

    def begin_step(self) -> None:
        """The request's next step begins; the model is before its first module."""
        progress = self.state.progress
        progress.step += 1
        progress.position = -1
        progress.before += progress.used
        progress.used = 0.0
        self.state.record.wrote.clear()

    def pass_step(self) -> None:
        """The request's step is over: all of its locations have passed."""
        self.state.progress.position = 1 << 62

    def start(self) -> None:
        """Run the block up to the first location it asks for."""
        self._runner.start()

    @property
    def own_process(self) -> bool:
        """Whether the code has a process of its own.

        The turns of several such blocks can pass at the same time.
        """
        return self._runner.own_process

    def announce(self) -> None:
        """Let a block with a process of its own go on if it waits for the step that begins next."""
        self._runner.announce()

    def serve(self, served: Served, at: Location, position: int) -> None:
        """Resume the block with the value at the location it waits for."""
        self._come_to(served, at, position)
        self._runner.serve(served)

    def begin_serve(self, served: Served, at: Location, position: int) -> Callable[[], None]:
        """Begin what `serve` does; return what ends it."""
        self._come_to(served, at, position)
        return self._runner.begin_serve(served)

    def _come_to(self, served: Served, at: Location, position: int) -> None:
        progress = self.state.progress
        progress.served, progress.served_at, progress.position = served, at, position
        self.state.record.tally.serve(f"{at.path}.{at.kind}")

    def pass_barrier(self, position: int, barrier: Barrier) -> None:
        """Resume a block that waits at a barrier; the model is at `position` of a step."""
        progress = self.state.progress
        progress.position = max(progress.position, position - 1)
        if barrier.broken:
            self._runner.throw(barrier.refusal())
        else:
            self._runner.resume(None)

    def resume(self, value: Any) -> None:
        """Resume a block that waits for a step, the result, a barrier, or a module that it applies."""
        self._runner.resume(value)

    def begin_resume(self, value: Any) -> Callable[[], None]:
        """Begin what `resume` does; return what ends it."""
        return self._runner.begin_resume(value)

    def throw(self, error: BaseException) -> None:
        """Raise `error` in the block, at the line where it waits."""
        self._runner.throw(error)

    def withdraw(self) -> None:
        """Take the block's loop out of the tables, before its first step there.

        The loop is not there on all ranks.
        """
        self._runner.withdraw()

    def bring_changes(self) -> None:
        """Have what the code changed at its location in the served value."""
        self._runner.bring_changes()

    def left(self) -> None:
        """The block moved on from the location it was served."""
        progress = self.state.progress
        served = progress.served
        if served is not None:
            self.state.record.stale_writes.leave(served)
            served.leave()
            self.state.registry.release(served)
        progress.served = progress.served_at = None

    def finish(self, result: Any) -> None:
        """The generation is over: what the block still waits for is the result or will never come.

        Args:
            result: what `tracer.result` is.
        """
        progress = self.state.progress
        progress.finished, progress.result = True, result
        self.pass_step()
        progress.before += progress.used
        progress.used = 0.0
        self._runner.finish()

    def fail(self, failure: pb.Failure) -> None:
        """End the block with a failure that is not its own."""
        if self.state.live:
            self._runner.cancel()
        self.state.ending.ended, self.state.ending.failure = Ended.FAILED, failure

    def cancel(self) -> None:
        """End the block without a result."""
        self._runner.cancel()
        self.state.ending.ended = Ended.CANCELLED

    def let_go(self, do: Callable[[], object]) -> None:
        """Drop objects of the block's, whose `__del__` may run, within its limits.

        Args:
            do: drops them.
        """
        self._runner.let_go(do)
