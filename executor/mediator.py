"""One invoke's block, running as a greenlet that takes strict turns with the forward pass.

A mediator waits at one location at a time. The interleaver resumes it there with the served value; the block runs until
it asks for another location, which parks it again. Greenlets keep the block on the thread that runs the forward, so a
turn costs a microsecond and nothing needs a lock; torch's per-thread modes and the random generators are the block's own
while it runs and the engine's otherwise.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn

import torch
from greenlet import getcurrent, greenlet

from executor.accounting import Tally
from executor.apply import Applier, Call
from executor.barriers import Barrier
from executor.budget import Budget
from executor.control import Cancel, Refusal, Stop
from executor.failures import describe, frames_here
from executor.fakes import Fakes
from executor.late import Late
from executor.random_state import RandomState
from executor.recorder import Recorder, wish
from executor.saves import SaveRegistry
from executor.served import Served, check
from executor.skips import Skips
from executor.tree import ModuleTree, Node
from executor.views.view import Unreachable, View
from interpose.cache import Cache
from interpose.saving import saving_with
from interpose.v1 import trace_pb2 as pb


class State(enum.IntEnum):
    """How far a mediator has come; it ends exactly one way."""

    WAITING = 0
    DONE = 1
    STOPPED = 2
    FAILED = 3
    CANCELLED = 4


class Kind(enum.StrEnum):
    """What a mediator can wait for."""

    INPUT = "input"
    OUTPUT = "output"
    PATTERN = "pattern"
    STEP = "step"
    RESULT = "result"
    BARRIER = "barrier"


@dataclass(frozen=True)
class Location:
    """A place in the generation: a module's input or output in one step, the beginning of a step, or the result.

    Attributes:
        shown: the canonical name it was asked for by, if it was.
    """

    path: str
    kind: str
    step: int
    shown: str = field(default="", compare=False)

    def __str__(self) -> str:
        name = self.shown or f"{self.path}.{self.kind}"
        return name + (f" (step {self.step})" if self.step else "")


class _Block(greenlet):
    """A greenlet that knows its mediator."""

    mediator: Mediator


def running() -> Mediator | None:
    """Return the mediator whose block is running on this thread, if any."""
    block = getcurrent()
    return block.mediator if isinstance(block, _Block) else None


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

    Attributes:
        pointer: the step that locations are asked for in.
        step: the step the request is in; -1 before the first.
        position: the model's place in that step (`ModuleTree.order_of`).
        served: the location the block is at, while it is there.
        waiting: what it waits for.
        call: the module that it wants applied, while it waits for that.
        barrier: where it waits for other invokes, while it does.
        skips: the modules that it skips.
        recorders: what it has recorded from step to step.
        used: seconds that it has taken in this step, with the modules that it applied.
        state, failure: how it ended.
        logs: how often it printed.
        edit: the name of the standing edit that it is, "" for a request's own block.
        owner: the engine's id of the request that the edit runs in.
        rank: its place among the blocks of one request.
        tally: where it was served and where it wrote.
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
    ) -> None:
        self.registry = registry
        self.request_id = request_id
        self.trace_id = trace_id
        self.invoke = invoke
        self.prompt_tokens = prompt_tokens
        self.namespace = namespace
        self._emit = emit
        self.logs = 0
        self.pointer = 0
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
        self._streamed = streamed
        self.skips = Skips(tree)
        self._late = Late()
        self.edit = ""
        self.owner = ""
        self.rank = 0
        self.state = State.WAITING
        self.failure: pb.Failure | None = None
        self.used = 0.0
        self.tally = Tally()
        self._offsets: dict[str, int] = {}
        self._code = code
        self._sources = sources
        self._tree = tree
        self._applier = applier
        self._budget = budget
        self._random = random_state
        self._result: Any = None
        self._finished = False
        self._inference = False
        self._grad = False
        self._device = tree.device
        with self._placed():
            self._modes = self._mode_depth()
        self._block = _Block(self._main)
        self._block.mediator = self

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

    # The interleaver's side.

    def begin_step(self) -> None:
        """The request's next step begins; the model is before its first module."""
        self.step += 1
        self.position = -1
        self.used = 0.0

    def pass_step(self) -> None:
        """The request's step is over: all of its locations have passed."""
        self.position = 1 << 62

    def start(self) -> None:
        """Run the block up to the first location it asks for."""
        self._turn(self._block.switch)

    def serve(self, served: Served, at: Location, position: int) -> None:
        """Resume the block with the value at the location it waits for."""
        self.served, self.served_at, self.position = served, at, position
        self.tally.serve(f"{at.path}.{at.kind}")
        self._turn(lambda: self._block.switch(served))

    def pass_barrier(self, place: int, barrier: Barrier) -> None:
        """Resume a block that waits at a barrier, in a step of the model that has come to `place`."""
        self.position = max(self.position, place - 1)
        if barrier.broken:
            self.throw(barrier.refusal())
        else:
            self.resume(None)

    def resume(self, value: Any) -> None:
        """Resume a block that waits for a step, the result, a barrier, or a module that it applies."""
        self._turn(lambda: self._block.switch(value))

    def throw(self, error: BaseException) -> None:
        """Raise `error` in the block, at the line where it waits."""
        self._turn(lambda: self._block.throw(error))

    def left(self) -> None:
        """The block moved on from the location it was served."""
        if self.served is not None:
            self._late.leave(self.served)
            self.registry.release(self.served)
        self.served = self.served_at = None

    def finish(self, result: Any) -> None:
        """The generation is over: what the block still waits for is the result or will never come.

        Args:
            result: what `tracer.result` is.
        """
        self._finished, self._result = True, result
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
            self.throw(self._never(waiting))

    def fail(self, failure: pb.Failure) -> None:
        """End the block with a failure that is not its own."""
        if self.live:
            self.cancel()
        self.state, self.failure = State.FAILED, failure

    def cancel(self) -> None:
        """End the block without a result."""
        if self.live and self._block:
            self.throw(Cancel())
        self.state = State.CANCELLED

    # The block's side.

    def read(self, node: Node, kind: str) -> Any:
        """Return the value at a module's input or output, waiting for it if need be."""
        return self._at(node, kind).value

    def read_view(self, view: View) -> Any:
        """Return a canonical value, waiting for its raw location if need be."""
        return view.read(self._at_view(view))

    def write_view(self, view: View, value: Any) -> None:
        """Replace a canonical value."""
        view.write(self._at_view(view), value)

    def _at_view(self, view: View) -> Served:
        if isinstance(view, Unreachable):
            raise view.refusal()
        return self._at(view.node, view.kind, view.owner, view.name)

    def read_input(self, node: Node) -> Any:
        """Return a module's first argument."""
        args, kwargs = self._at(node, Kind.INPUT).value
        if args:
            return args[0]
        if kwargs:
            return next(iter(kwargs.values()))
        raise Refusal(
            pb.ERROR_CODE_UNKNOWN_LOCATION, f"{node.path} is called without arguments", location=f"{node.path}.input"
        )

    def write(self, node: Node, kind: str, value: Any) -> None:
        """Replace the value at a module's input or output."""
        self._at(node, kind).assign(value)

    def write_input(self, node: Node, value: Any) -> None:
        """Replace a module's first argument."""
        args, kwargs = self._at(node, Kind.INPUT).value
        if args:
            args[0] = value
        elif kwargs:
            name = next(iter(kwargs))
            check(kwargs[name], value, f"{node.path}.input")
            kwargs[name] = value

    def skip(self, node: Node, value: Any) -> None:
        """Have a module's output be `value`, whatever the module makes; resumes when the model is there."""
        self._check_prompt("module.skip(value) is a request's own")
        step = self.pointer + self._offsets.get(node.path, 0)
        self.skips.begin(node, step, -1 if step > self.step else 1 << 62 if step < self.step else self.position)
        self._at(node, Kind.OUTPUT).assign(value)

    def apply(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a module makes of the block's own values."""
        if self.fakes is not None:
            args, kwargs = self.fakes.real((args, kwargs))
        call = self._applier.prepare(node, args, kwargs)
        self._check_modes(f"{call} was applied", node.path)
        self.call = call
        try:
            made = self._block.parent.switch(call)
        finally:
            self.call = None
        return made if self.fakes is None else self.fakes.of(made)

    def await_barrier(self, barrier: Barrier) -> None:
        """Wait until as many invokes have come to a barrier as it counts."""
        if not self.companions:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                "this block has no other invokes to wait for: a barrier belongs to the invokes of the trace that made it",
                location="barrier()",
            )
        self._check_prompt("barrier() waits for the blocks of other prompts")
        if self._finished:
            raise barrier.too_late()
        if barrier.broken:
            raise barrier.refusal()
        if barrier.count == 1:
            return
        if self.served is not None:  # others may have it while this block waits
            self.registry.hold(self.served)
        barrier.waiting.append(self)
        self.barrier = barrier
        try:
            self._park(Location("", Kind.BARRIER, 0, str(barrier)))
        finally:
            self.barrier = None
            if self in barrier.waiting:
                barrier.waiting.remove(self)

    def log(self, text: str) -> None:
        """Send text to the notebook."""
        self.logs += self._emit(text)

    def save(self, value: Any) -> Any:
        """Keep a value past the block; return what the block goes on with."""
        if self.edit:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                "an edit saves nothing, it runs inside other requests; save in the block of a trace that names it",
            )
        return self.registry.save(value, self.served)

    def record(
        self, modules: object, device: object, dtype: object, include_output: bool, include_inputs: bool
    ) -> Cache:
        """Record modules from here on; return what fills."""
        if self.edit or self._streamed:
            what = "an edit saves nothing" if self.edit else "a streamed trace brings what is new with every output"
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{what}, so there is no tracer.cache() in it; append the values to a list: kept.append(layer.output.save())",
                location="tracer.cache",
            )
        frames = frames_here(self._sources)
        recorder = Recorder(wish(self._tree, modules, device, dtype, include_output, include_inputs, frames))
        self.recorders.append(recorder)
        self.registry.mark(recorder.cache, recorder.cache)
        return recorder.cache

    def stop(self) -> NoReturn:
        """End the request."""
        if self.edit:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                "an edit does not end the requests that it runs in; use tracer.stop() in the block of a trace",
            )
        self._check_prompt("tracer.stop() ends the request of a block")
        raise Stop

    def _check_prompt(self, what: str) -> None:
        if self.whole:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{what}, and tracer.invoke() without a prompt has none; write it in the blocks of the prompts",
            )

    def advance(self, node: Node) -> None:
        """Move on to a module's next step."""
        self._offsets[node.path] = self._offsets.get(node.path, 0) + 1

    def await_step(self, step: int) -> bool:
        """Wait until `step` begins; return False if the generation ends before."""
        if step < self.step:
            raise Refusal(
                pb.ERROR_CODE_OUT_OF_ORDER,
                f"step {step} had already passed (the block is in step {self.step}); go through steps in rising order",
                location=f"tracer.iter[{step}]",
            )
        if step > self.step and (self._finished or not self._park(Location("", Kind.STEP, step))):
            return False
        self.pointer = step
        self._offsets.clear()
        return True

    def await_result(self) -> Any:
        """Wait for the end of the generation and return its result."""
        return self._result if self._finished else self._park(Location("", Kind.RESULT, 0))

    def _at(self, node: Node, kind: str, owner: str | None = None, shown: str = "") -> Served:
        """Return what is served at a location, waiting for it if need be.

        Args:
            node: the module.
            kind: which of its locations.
            owner: the path that `next()` counts for, if another than the module's.
            shown: what errors call the location, if otherwise than by its raw name.
        """
        step = self.pointer + self._offsets.get(node.path if owner is None else owner, 0)
        location = Location(node.path, kind, step, shown)
        if self.served is not None and self.served_at == location:
            self.served.put_back()
            return self.served
        place = self._tree.order_of(node.path, kind)
        if self._finished:
            raise self._never(location)
        if location.step < self.step or (location.step == self.step and place <= self.position):
            skipped = self.skips.around(node.path, location.step)
            if skipped:
                raise Refusal(
                    pb.ERROR_CODE_OUT_OF_ORDER,
                    f"{location} lies in {skipped}, which the block skipped in this step: nothing is computed there",
                    location=str(location),
                )
            at = f" (the block is at {self.served_at})" if self.served_at else f" (the request is in step {self.step})"
            raise Refusal(
                pb.ERROR_CODE_OUT_OF_ORDER,
                f"{location} had already passed when it was asked for{at}; ask for locations in the order the model runs "
                "them, and keep a value in a variable if it is needed again",
                location=str(location),
            )
        return self._park(location)

    def _never(self, location: Location) -> Refusal:
        return Refusal(
            pb.ERROR_CODE_UNKNOWN_LOCATION,
            f"{location} was never reached: the generation ended after {self.steps} step{'s' if self.steps != 1 else ''}",
            location=str(location),
        )

    def _park(self, location: Location) -> Any:
        self._check_modes(f"{location} was asked for", str(location))
        self._late.check_recent()
        self.waiting = location
        try:
            return self._block.parent.switch(location)
        finally:
            self.waiting = None

    def _check_modes(self, what: str, where: str) -> None:
        if self._mode_depth() != self._modes:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{what} inside a torch mode (autocast, a default device, a function or dispatch mode), which would reach "
                "the model too; read the value first, then open the mode around your own computation",
                location=where,
            )

    def _main(self, *_: Any) -> None:
        try:
            with saving_with(self.save):
                ended = self._run()
            self._late.check_all()
            self.state = ended
        except Cancel:
            self.state = State.CANCELLED
        except BaseException as error:
            self.failure = describe(error, self._sources, self.trace_id, self.invoke)
            self.state = State.FAILED
        finally:
            self.waiting = None

    def _run(self) -> State:
        try:
            exec(self._code, self.namespace)
        except Stop:
            return State.STOPPED
        return State.DONE

    def _turn(self, switch: Callable[[], Any]) -> None:
        """Let the block run until it parks or ends, with its own torch modes and random generators."""
        if self._random is not None:
            self._random.enter()
        self._budget.arm(self._is_running, self.used)
        try:
            with torch.inference_mode(self._inference), self._placed():
                torch._C._set_grad_enabled(self._grad)
                try:
                    switch()
                except BaseException as error:
                    # The timer struck while the block was already ending; the block is over all the same.
                    if not self._block.dead:
                        raise
                    self.failure = describe(error, self._sources, self.trace_id, self.invoke)
                    self.state = State.FAILED
                finally:
                    self._inference, self._grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        finally:
            self.used += self._budget.disarm()
            if self._random is not None:
                self._random.leave()

    def _placed(self) -> AbstractContextManager[object]:
        """Have tensors that the block makes be where the model's values are, so that it runs on any device as it is."""
        return nullcontext() if self._device.type == "cpu" else self._device

    def _is_running(self) -> bool:
        return getcurrent() is self._block

    @staticmethod
    def _mode_depth() -> tuple[int, int, bool, bool]:
        return (
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        )
