"""Runs a block as a greenlet on the thread of the forward pass.

In its turns a block has its own torch modes (`executor.block.fiber`), random generators and process state, and the budget bounds
each turn. A block that did in its turn what no block may is failed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from executor.block.api import Loop, Program, RunningBlock
from executor.block.budget import NOBODY, Budget
from executor.block.process_state import OwnState, complaint
from executor.block.rng import RandomState
from executor.block.runner import Runner
from executor.block.state import BlockState
from executor.core.ended import Ended
from executor.core.errors import BudgetExceeded, Cancel
from executor.model.apply import Applier
from executor.model.tree import ModuleTree
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb

_CLOSINGS = 8  # attempts to end a block that does not want to
_STRAYED = (
    "the block gave control to the engine in another way than by asking for a location (it switched to or threw into a greenlet "
    "that is not its own); remove that, and use only greenlets that the block has made"
)

_unending: list[object] = []  # the fibers of blocks that nothing ends


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a block's turns are bounded by, and what they have for themselves.

    Attributes:
        budget: time and memory bounds.
        blame: the id of the client's trace, as the budget takes it.
        random_state: the trace's random generators, or None when its code uses none.
    """

    budget: Budget
    blame: bytes = NOBODY
    random_state: RandomState | None = None


class GreenletRunner(Runner):
    """Runs one block as a greenlet.

    Args:
        state: the block's state.
        program: the code and its names.
        tree: the model's modules.
        applier: applies modules to the block's values.
        bounds: what each turn is bounded by.
        block: makes what the code asks.
    """

    def __init__(
        self,
        state: BlockState,
        program: Program,
        tree: ModuleTree,
        applier: Applier,
        bounds: Bounds,
        block: type[RunningBlock] = RunningBlock,
    ) -> None:
        super().__init__(state)
        self._program = program
        self._budget = bounds.budget
        self._blame = bounds.blame
        self._random = bounds.random_state
        self._own = OwnState()
        self._block = block(state, program, tree, applier)
        self._of = lambda code: GreenletRunner(state, replace(program, code=code), tree, applier, bounds, block)
        self._fiber = self._block.fiber

    @property
    def names(self) -> dict[str, Any]:
        return self._program.names

    @property
    def block(self) -> RunningBlock:
        """What the code asks."""
        return self._block

    @property
    def holds_state(self) -> bool:
        """Whether the block has changed process state that holds in its turns."""
        return self._own.held

    @property
    def loop(self) -> Loop | None:
        """The loop over steps that waits for a step, or waited last."""
        return self._block.loop

    @property
    def lends_names(self) -> bool:
        return any(isinstance(part, CodeType) for part in self._program.code.co_consts)

    @property
    def alive(self) -> bool:
        return self._fiber.alive

    def with_code(self, code: CodeType) -> GreenletRunner:
        """Return a runner of other code of the block, with the same names."""
        return self._of(code)

    def start(self) -> None:
        self._turn(self._fiber.switch, None)

    def serve(self, served: Served) -> None:
        self._turn(self._fiber.switch, served)

    def resume(self, value: Any) -> None:
        self._turn(self._fiber.switch, value)

    def throw(self, error: BaseException) -> None:
        self._turn(self._fiber.throw, error)

    def cancel(self) -> None:
        self._fiber.closing = True
        for _ in range(_CLOSINGS):
            if not self._fiber.alive:
                return
            self._turn(self._fiber.throw, Cancel())
        if self._fiber.alive:
            # Python would end the fiber when no object refers to it any more, outside of any budget.
            _unending.append(self._fiber)

    def let_go(self, do: Callable[[], object]) -> None:
        progress, ending = self._state.progress, self._state.ending
        try:
            _, seconds = self._budget.run(do, progress.used, self._blame)
            progress.used += seconds
        except BudgetExceeded as error:
            if ending.failure is None:
                ending.ended, ending.failure = Ended.FAILED, self._block.describe(error)

    def _turn(self, turn: Callable[[Any], None], value: Any) -> None:
        """Let the block run until it parks or ends, within its budget.

        It runs with its own random generators and its own process state.
        """
        fiber, progress = self._fiber, self._state.progress
        self._state.ran("block", self._state.record.tally.why)
        self._own.enter(self._budget.round.outside)
        if self._random is not None:
            self._random.enter()
        self._budget.arm(fiber.is_running, progress.used, self._blame)
        stray: BaseException | None = None
        try:
            turn(value)
        except BaseException as error:
            stray = error
        finally:
            progress.used += self._budget.disarm()
            if self._random is not None:
                self._random.leave()
            left = self._own.leave(fiber.dead)
        self._judge(stray, left)

    def _judge(self, stray: BaseException | None, left: list[str]) -> None:
        """Fail a block that did in its turn what no block may.

        Args:
            stray: what came out of the block.
            left: what the block changed in the process, of what it may not change.
        """
        fiber, ending = self._fiber, self._state.ending
        if fiber.closing:
            return
        if stray is not None and fiber.dead:
            # The timer struck while the block was already ending; the block is over all the same.
            ending.ended, ending.failure = Ended.FAILED, self._block.describe(stray)
        elif stray is not None or (fiber.alive and not fiber.parked):
            self._break_off(_STRAYED)
        elif self._budget.struck and ending.ended is not Ended.FAILED:
            self._break_off(self._budget.exceeded().message, pb.ERROR_CODE_DEADLINE_EXCEEDED)
        elif left and ending.ended is not Ended.FAILED:
            self._break_off(complaint(left))

    def _break_off(self, message: str, code: pb.ErrorCode = pb.ERROR_CODE_INTERVENTION) -> None:
        self.cancel()
        identity, ending = self._state.identity, self._state.ending
        failure = pb.Failure(code=code, message=message, trace_id=identity.trace_id, invoke=identity.invoke)
        ending.ended, ending.failure = Ended.FAILED, failure
