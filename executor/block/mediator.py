"""One invoke's block, seen from the forward pass: where the request is, what its block waits for, and how it ended.

A mediator waits at one location at a time. The interleaver resumes it there with the served value; the block
(`executor.block.api`) runs until it asks for another location, which parks it again. Turns are strict, so what the two
sides share needs no lock; a block's torch modes are its own (`executor.block.fiber`), and so are its random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch

from executor.block.api import RunningBlock
from executor.block.barrier import Barrier
from executor.block.budget import NOBODY, Budget
from executor.block.cache import Recorder
from executor.block.process_state import OwnState, complaint
from executor.block.rng import RandomState
from executor.block.stale_writes import Late
from executor.block.tally import Tally
from executor.core.errors import BudgetExceeded, Cancel, Refusal
from executor.core.location import Kind, Location, State
from executor.model.apply import Applier, Call
from executor.model.meta_tensors import Fakes
from executor.model.skips import Skips
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


class Mediator:
    """Runs one invoke's block.

    Args:
        request_id: the engine's id of the request.
        trace_id: the trace.
        invoke: the invoke's index in the trace.
        prompt_tokens: length of the prompt.
        code: the compiled block.
        namespace: the block's names; the block runs in it.
        sources: the user's source lines by file name, for tracebacks.
        tree: the model's modules.
        applier: applies modules to the block's values.
        budget: time and memory bounds.
        registry: the trace's saved values.
        emit: called with text that the block prints; returns whether it was sent.
        random_state: the trace's random generators, or None when its code uses none.
        companions: how many invokes of the trace start together with it, itself included; 0: none does.
        whole: whether it has no prompt and sees the rows of its companions.
        streamed: whether what it saves leaves step by step.
        fakes: makes its tensors, of a block that is scanned.
        blame: the id of the client's trace, as the budget takes it.

    Attributes:
        registry, emit, companions, whole, fakes: as given.
        step: the step the request is in; -1 before the first.
        position: the model's place in that step (`ModuleTree.order_of`).
        served, served_at: what the block was served, and where, while it is there.
        waiting: what it waits for.
        call: the module that it wants applied, while it waits for that.
        barrier: where it waits for other invokes, while it does.
        skips: the modules that it skips.
        recorders: what it has recorded from step to step.
        late: what it was served and may change no longer.
        finished, result: whether the generation is over, and what it gave.
        result_asked: whether the block asked for the result, which lets the whole generation pass.
        used: seconds that it has taken in this step, with the modules that it applied.
        state, failure: how it ended.
        logs: how often it printed.
        edit: the name of the standing edit that it is, "" for a request's own block.
        owner: the engine's id of the request that the edit runs in.
        rank: its place among the blocks of one request.
        tally: where it was served and where it wrote.
        wrote: digests of what it wrote in this step, where other ranks are to have written the same.
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
        self.registry = registry
        self.request_id = request_id
        self.trace_id = trace_id
        self.invoke = invoke
        self.prompt_tokens = prompt_tokens
        self.namespace = namespace
        self.emit = emit
        self.logs = 0
        self.step = -1
        self.position = -1
        self.served: Served | None = None
        self.served_at: Location | None = None
        self.waiting: Location | None = None
        self.call: Call | None = None
        self.barrier: Barrier | None = None
        self.companions = companions
        self.whole = whole
        self.recorders: list[Recorder] = []
        self.fakes = fakes
        self.skips = Skips(tree)
        self.late = Late()
        self.edit = ""
        self.owner = ""
        self.rank = 0
        self.state = State.WAITING
        self.failure: pb.Failure | None = None
        self.used = 0.0
        self.tally = Tally()
        self.wrote: list[torch.Tensor] = []
        self.finished = False
        self.result: Any = None
        self.result_asked = False
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

    @property
    def live(self) -> bool:
        """Whether the block still waits for something."""
        return self.state is State.WAITING

    @property
    def resting(self) -> bool:
        """Whether the block has ended or waits for the result: it asks for nothing in a coming step."""
        return not self.live or (self.waiting is not None and self.waiting.kind == Kind.RESULT)

    @property
    def changed(self) -> bool:
        """Whether the block changed anything in the model's pass, so that computing the request anew would be wrong."""
        return bool(self.tally.writes or self.skips.fingerprint())

    @property
    def steps(self) -> int:
        """Steps begun."""
        return self.step + 1

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
        self.state, self.failure = State.FAILED, failure

    def cancel(self) -> None:
        """End the block without a result."""
        self._close()
        self.state = State.CANCELLED

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
                self.state, self.failure = State.FAILED, self._block.describe(error)

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

    def never(self, location: Location) -> Refusal:
        """Why a location is not served: the generation is over."""
        message = f"{location} was never reached: the generation ended after {self.steps} step{'s' if self.steps != 1 else ''}"
        if self.result_asked:
            message += ". tracer.result waits for the end of the generation, and the block read it first; read it last"
        return Refusal(pb.ERROR_CODE_UNKNOWN_LOCATION, message, location=str(location))

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
            self.state, self.failure = State.FAILED, self._block.describe(stray)
        elif stray is not None or (self._strand.alive and not self._strand.parked):
            self._break_off(_STRAYED)
        elif self._budget.struck and self.state is not State.FAILED:
            self._break_off(self._budget.exceeded().message, pb.ERROR_CODE_DEADLINE_EXCEEDED)
        elif left and self.state is not State.FAILED:
            self._break_off(complaint(left))

    def _break_off(self, message: str, code: pb.ErrorCode = pb.ERROR_CODE_INTERVENTION) -> None:
        self._close()
        self.state, self.failure = State.FAILED, pb.Failure(code=code, message=message)
        self.failure.trace_id, self.failure.invoke = self.trace_id, self.invoke
