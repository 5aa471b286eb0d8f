"""One invoke's block, seen from the forward pass: where the request is, what its block waits for, and how it ended.

A mediator waits at one location at a time. The interleaver resumes it there with the served value; the block
(`executor.block.api`) runs until it asks for another location, which parks it again. Turns are strict, so what the two
sides share needs no lock; a block's torch modes are its own (`executor.block.fiber`), and so are its random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from executor.block.api import RunningBlock
from executor.block.barrier import Barrier
from executor.block.budget import NOBODY, Budget
from executor.block.process_state import OwnState, complaint
from executor.block.rng import RandomState
from executor.block.state import BlockState
from executor.core.ended import Ended
from executor.core.errors import BudgetExceeded, Cancel, Refusal
from executor.core.location import Kind, Location
from executor.model.apply import Applier
from executor.model.meta_tensors import Fakes
from executor.model.tree import ModuleTree
from executor.model.values import Served
from executor.saves.encoder import SaveRegistry
from interpose.v1 import trace_pb2 as pb

_CLOSINGS = 8  # attempts to end a block that does not want to
_STRAYED = (
    "the block gave control to the engine in another way than by asking for a location (it switched to or threw into a greenlet "
    "that is not its own); remove that, and use only greenlets that the block has made"
)

_unending: list[object] = []  # the strands of blocks that nothing ends


class Mediator(BlockState):
    """Runs one invoke's block.

    Args:
        prompt_tokens: length of the prompt.
        code: the compiled block.
        sources: the user's source lines by file name, for tracebacks.
        applier: applies modules to the block's values.
        budget: time and memory bounds.
        random_state: the trace's random generators, or None when its code uses none.
        streamed: whether what it saves leaves step by step.
        blame: the id of the client's trace, as the budget takes it.
        request_id, trace_id, invoke, namespace, tree, registry, emit, companions, whole, fakes: as of `BlockState`.

    Attributes:
        prompt_tokens: as given.
    """

    def __init__(
        self,
        *,
        request_id: str,
        trace_id: str,
        invoke: int,
        prompt_tokens: int,
        code: CodeType,
        namespace: dict[str, Any],
        sources: dict[str, dict[int, str]],
        tree: ModuleTree,
        applier: Applier,
        budget: Budget,
        registry: SaveRegistry,
        emit: Callable[[str], bool],
        random_state: RandomState | None,
        companions: int = 0,
        whole: bool = False,
        streamed: bool = False,
        fakes: Fakes | None = None,
        blame: bytes = NOBODY,
    ) -> None:
        super().__init__(
            request_id=request_id,
            trace_id=trace_id,
            invoke=invoke,
            namespace=namespace,
            tree=tree,
            registry=registry,
            emit=emit,
            companions=companions,
            whole=whole,
            fakes=fakes,
        )
        self.prompt_tokens = prompt_tokens
        self._budget = budget
        self._code = code
        self._blame = blame
        self._own = OwnState()
        self._random = random_state
        self._block = RunningBlock(self, code, sources, tree, applier, streamed)
        self._strand = self._block.strand

    def bound(self, names: Iterable[str]) -> dict[str, Any]:
        """Return those of the names that are bound, with what they are bound to."""
        return {name: self.namespace[name] for name in names if name in self.namespace}

    @property
    def defines(self) -> bool:
        """Whether the block defines functions or classes, which find its names for as long as anybody calls them."""
        return any(isinstance(part, CodeType) for part in self._code.co_consts)

    def become_edit(self, name: str, owner: str, rank: int) -> None:
        """Be a standing edit in a request, not the request's own block."""
        self.edit, self.owner, self.rank = name, owner, rank

    def begin_step(self) -> None:
        """The request's next step begins; the model is before its first module."""
        self.step += 1
        self.position = -1
        self.used = 0.0
        self.wrote.clear()

    def pass_step(self) -> None:
        """The request's step is over: all of its locations have passed."""
        self.position = 1 << 62

    def start(self) -> None:
        """Run the block up to the first location it asks for."""
        self._turn(self._strand.switch)

    def serve(self, served: Served, at: Location, position: int) -> None:
        """Resume the block with the value at the location it waits for."""
        self.served, self.served_at, self.position = served, at, position
        self.tally.serve(f"{at.path}.{at.kind}")
        self._turn(lambda: self._strand.switch(served))

    def pass_barrier(self, place: int, barrier: Barrier) -> None:
        """Resume a block that waits at a barrier, in a step of the model that has come to `place`."""
        self.position = max(self.position, place - 1)
        if barrier.broken:
            self.throw(barrier.refusal())
        else:
            self.resume(None)

    def resume(self, value: Any) -> None:
        """Resume a block that waits for a step, the result, a barrier, or a module that it applies."""
        self._turn(lambda: self._strand.switch(value))

    def throw(self, error: BaseException) -> None:
        """Raise `error` in the block, at the line where it waits."""
        self._turn(lambda: self._strand.throw(error))

    def left(self) -> None:
        """The block moved on from the location it was served."""
        if self.served is not None:
            self.late.leave(self.served)
            self.served.leave()
            self.registry.release(self.served)
        self.served = self.served_at = None

    def finish(self, result: Any) -> None:
        """The generation is over: what the block still waits for is the result or will never come.

        Args:
            result: what `tracer.result` is.
        """
        self.finished, self.result = True, result
        self.pass_step()
        self.used = 0.0
        waiting = self.waiting
        if waiting is None:
            self.throw(Refusal(pb.ERROR_CODE_UNAVAILABLE, "the request ended before it ran; submit it again"))
        elif waiting.kind == Kind.RESULT:
            self.resume(result)
        elif waiting.kind == Kind.STEP:
            self.resume(False)
        elif self.barrier is not None:
            self.throw(self.barrier.ended())
        else:
            self.throw(self.never(waiting))

    def fail(self, failure: pb.Failure) -> None:
        """End the block with a failure that is not its own."""
        if self.live:
            self.cancel()
        self.ended, self.failure = Ended.FAILED, failure

    def cancel(self) -> None:
        """End the block without a result."""
        self._close()
        self.ended = Ended.CANCELLED

    def let_go(self, do: Callable[[], object]) -> None:
        """Drop objects of the block's, whose `__del__` may run, within its budget.

        Args:
            do: drops them.
        """
        try:
            _, seconds = self._budget.run(do, self.used, self._blame)
            self.used += seconds
        except BudgetExceeded as error:
            if self.failure is None:
                self.ended, self.failure = Ended.FAILED, self._block.describe(error)

    def _close(self) -> None:
        """End the block's code where it is, however it takes that."""
        self._strand.closing = True
        for _ in range(_CLOSINGS):
            if not self._strand.alive:
                return
            self._turn(lambda: self._strand.throw(Cancel()))
        if self._strand.alive:
            # Python would end it when nobody refers to it any more, outside of any budget.
            _unending.append(self._strand)

    def _turn(self, turn: Callable[[], None]) -> None:
        """Let the block run until it parks or ends, within its budget, with its own random generators and process state."""
        self._own.enter()
        if self._random is not None:
            self._random.enter()
        self._budget.arm(self._strand.is_running, self.used, self._blame)
        stray: BaseException | None = None
        try:
            turn()
        except BaseException as error:
            stray = error
        finally:
            self.used += self._budget.disarm()
            if self._random is not None:
                self._random.leave()
            left = self._own.leave(self._strand.dead)
        self._judge(stray, left)

    def _judge(self, stray: BaseException | None, left: list[str]) -> None:
        """Fail a block that did in its turn what no block may.

        Args:
            stray: what came out of it.
            left: what it changed in the process, of what it may not change.
        """
        if self._strand.closing:
            return
        if stray is not None and self._strand.dead:
            # The timer struck while the block was already ending; the block is over all the same.
            self.ended, self.failure = Ended.FAILED, self._block.describe(stray)
        elif stray is not None or (self._strand.alive and not self._strand.parked):
            self._break_off(_STRAYED)
        elif self._budget.struck and self.ended is not Ended.FAILED:
            self._break_off(self._budget.exceeded().message, pb.ERROR_CODE_DEADLINE_EXCEEDED)
        elif left and self.ended is not Ended.FAILED:
            self._break_off(complaint(left))

    def _break_off(self, message: str, code: pb.ErrorCode = pb.ERROR_CODE_INTERVENTION) -> None:
        self._close()
        self.ended, self.failure = Ended.FAILED, pb.Failure(code=code, message=message)
        self.failure.trace_id, self.failure.invoke = self.trace_id, self.invoke
