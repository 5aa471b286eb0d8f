"""The block's side: what the code of a block can ask for while it runs.

Every name that a block uses (`executor.block.envoy`) ends in a method here. A method that asks for a location which the model has
not come to parks the block. A method that asks for a value that cannot be given raises at the block's own line.

Size: a method for each thing that a block can ask for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

import torch

from executor.block.barrier import Barrier
from executor.block.cache import Recorder, wish
from executor.block.fiber import Fiber
from executor.block.interface import LOOP_OVER
from executor.block.state import BlockState
from executor.block.traceback import describe, frames_here
from executor.core.ended import Ended
from executor.core.errors import Cancel, Refusal, Stop
from executor.core.location import Kind, Location
from executor.model.apply import Applier
from executor.model.call import Call
from executor.model.items import check
from executor.model.last_rows import last_of, refused
from executor.model.node import Node, Unreachable, View
from executor.model.parameters import Wanted, refuse_write
from executor.model.tree import LOGITS, PSEUDO, ModuleTree
from executor.model.values import Served
from executor.saves.registry import refuse_names
from interpose.contract.cache import Cache
from interpose.contract.saving import saving_with
from interpose.v1 import trace_pb2 as pb


@dataclass(frozen=True, slots=True)
class Program:
    """The code of one block, bound to the values that it reads.

    Attributes:
        code: the compiled block.
        names: the block's names; the code runs in this dict.
        sources: the user's source lines by file name, for tracebacks.
        streamed: whether what the block saves leaves step by step.
    """

    code: CodeType
    names: dict[str, Any]
    sources: dict[str, dict[int, str]]
    streamed: bool = False


@dataclass
class Loop:
    """A loop over steps that waits for a step.

    Attributes:
        coming: gives the steps after the awaited step. A plan that runs steps takes them from there.
        asked: the awaited step.
        line: the notebook's line, 0 where the loop is in a function.
    """

    coming: Iterator[int]
    asked: int
    line: int


@dataclass(frozen=True)
class Passed:
    """What a block is resumed with when a plan has run the step that it waits for, and others.

    Attributes:
        step: the step that has begun now, in which the block itself goes on; None: the plan has run the loop's last step.
    """

    step: int | None


class RunningBlock:
    """The code of one block, and what it asks for.

    Args:
        state: the block's state; what the block asks for is written there.
        program: the code and its names.
        tree: the model's modules.
        applier: applies modules to the block's values.

    Attributes:
        fiber: runs the code.
        pointer, missed: as of `executor.block.interface.Block`.
        loop: the loop over steps that waits for a step, or waited last.
    """

    def __init__(self, state: BlockState, program: Program, tree: ModuleTree, applier: Applier) -> None:
        self.fiber = Fiber(self._main, self, tree.device)
        self.pointer = 0
        self.missed = 0
        self.loop: Loop | None = None
        self._offsets: dict[str, int] = {}
        self._state = state
        self._program = program
        self._tree = tree
        self._applier = applier

    @property
    def steps(self) -> int:
        """Steps begun."""
        return self._state.steps

    # Its run, from the beginning to the end.

    def _main(self, *_: Any) -> None:
        state = self._state
        try:
            with saving_with(self.save):
                ended = self._run()
            state.record.stale_writes.check_all()
            state.ending.ended = ended
        except Cancel:
            state.ending.ended = Ended.CANCELLED
        except BaseException as error:
            state.ending.failure = self.describe(error)
            state.ending.ended = Ended.FAILED
        finally:
            state.waits.location = None

    def _run(self) -> Ended:
        try:
            exec(self._program.code, self._program.names)
        except Stop:
            return Ended.STOPPED
        return Ended.DONE

    def describe(self, error: BaseException) -> pb.Failure:
        """Return what the client is told of an exception of the block's."""
        state = self._state
        return describe(error, self._program.sources, state.identity.trace_id, state.identity.invoke)

    # Values of the model.

    def read(self, node: Node, kind: str) -> Any:
        """Return the value at a module's input or output, waiting for it if need be."""
        return self._last_of(self._at(node, kind).value, node.path, f"{node.path}.{kind}")

    def read_view(self, view: View) -> Any:
        """Return a canonical value, waiting for its raw location if need be."""
        value = view.read(self._at_view(view))
        if not view.counts_tokens:
            self._check_complete(view.node.path, view.name)
        return self._last_of(value, view.node.path, view.name)

    def write_view(self, view: View, value: Any) -> None:
        """Replace a canonical value."""
        served = self._at_view(view)
        self._check_complete(view.node.path, view.name)
        view.write(served, value)

    def _at_view(self, view: View) -> Served:
        if isinstance(view, Unreachable):
            raise view.refusal()
        return self._at(view.node, view.kind, view.owner, view.name)

    def read_input(self, node: Node) -> Any:
        """Return a module's first argument."""
        args, kwargs = self._at(node, Kind.INPUT).value
        if args or kwargs:
            first = args[0] if args else next(iter(kwargs.values()))
            return self._last_of(first, node.path, f"{node.path}.input")
        raise Refusal(
            pb.ERROR_CODE_UNKNOWN_LOCATION, f"{node.path} is called without arguments", location=f"{node.path}.input"
        )

    def write(self, node: Node, kind: str, value: Any) -> None:
        """Replace the value at a module's input or output."""
        self._complete(node, kind).assign(value)

    def write_input(self, node: Node, value: Any) -> None:
        """Replace a module's first argument."""
        args, kwargs = self._complete(node, Kind.INPUT).value
        if args:
            args[0] = value
        elif kwargs:
            name = next(iter(kwargs))
            check(kwargs[name], value, f"{node.path}.input")
            kwargs[name] = value

    def skip(self, node: Node, value: Any) -> None:
        """Replace a module's output by `value`; return when the model is there."""
        progress = self._state.progress
        self._check_prompt("module.skip(value) is a request's own")
        step = self.pointer + self._offsets.get(node.path, 0)
        if step == 0 and progress.last:
            raise refused(f"{node.path}.skip(value)", progress.last)
        position = -1 if step > progress.step else 1 << 62 if step < progress.step else progress.position
        self._state.record.skips.begin(node, step, position)
        self._at(node, Kind.OUTPUT).assign(value)

    def apply(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a module makes of the block's own values."""
        state = self._state
        if state.fakes is not None:
            args, kwargs = state.fakes.real((args, kwargs))
        return self._answered(self._applier.prepare(node, args, kwargs))

    def parameter(self, node: Node, name: str) -> Any:
        """Return a weight of a module: a tensor, or what gives its rows."""

        def read(wanted: Wanted) -> torch.Tensor:  # [...], the parameter or the wanted rows of it
            value: torch.Tensor = self._answered(Call(node, (), {}, single=False, wanted=wanted))
            if self._state.fakes is not None:
                return self._state.fakes.like(value)
            self._state.record.stale_writes.watch(value, refuse_write(node.path, name))
            return value

        return self._applier.parameters.open(node, name, read)

    def _answered(self, call: Call) -> Any:
        """Park until the engine has answered a call."""
        state = self._state
        self.fiber.check_modes(call, call.node.path)
        state.waits.call = call
        try:
            made = self.fiber.park(call)
        finally:
            state.waits.call = None
        return made if state.fakes is None else state.fakes.of(made)

    def await_barrier(self, barrier: Barrier) -> None:
        """Wait until as many invokes have come to a barrier as it counts."""
        state = self._state
        if not state.identity.gang:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                "this block has no other invokes to wait for: a barrier belongs to the invokes of the trace that made it",
                location="barrier()",
            )
        self._check_prompt("barrier() waits for the blocks of other prompts")
        if state.progress.finished:
            raise barrier.after_generation()
        if barrier.broken:
            raise barrier.refusal()
        if barrier.count == 1:
            return
        if state.progress.served is not None:  # others may have it while this block waits
            state.registry.hold(state.progress.served)
        state.waits.barrier = barrier
        try:
            self._park(Location("", Kind.BARRIER, 0, str(barrier)))
        finally:
            state.waits.barrier = None

    def log(self, text: str) -> None:
        """Send text to the notebook."""
        self._state.record.logs += self._state.emit(text)

    def save(self, value: Any) -> Any:
        """Keep a value past the block; return what the block goes on with."""
        state = self._state
        if state.identity.edit:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                "an edit saves nothing, it runs inside other requests; save in the block of a trace that names it",
            )
        refuse_names(value)
        return state.registry.save(value, state.progress.served)

    def record(
        self, modules: object, device: object, dtype: object, include_output: bool, include_inputs: bool
    ) -> Cache:
        """Record modules from here on; return what fills."""
        state = self._state
        if state.identity.edit or self._program.streamed:
            what = (
                "an edit saves nothing"
                if state.identity.edit
                else "a streamed trace brings what is new with every output"
            )
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{what}, so there is no tracer.cache() in it; append the values to a list: kept.append(layer.output.save())",
                location="tracer.cache",
            )
        progress = state.progress
        if progress.last and progress.step <= 0 and progress.position < self._tree.order_of(LOGITS, Kind.OUTPUT):
            raise refused("tracer.cache()", progress.last)
        frames = frames_here(self._program.sources)
        recorder = Recorder(wish(self._tree, modules, device, dtype, include_output, include_inputs, frames))
        state.record.recorders.append(recorder)
        state.registry.mark(recorder.cache, recorder.cache)
        return recorder.cache

    def stop(self) -> NoReturn:
        """End the request."""
        if self._state.identity.edit:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                "an edit does not end the requests that it runs in; use tracer.stop() in the block of a trace",
            )
        self._check_prompt("tracer.stop() ends the request of a block")
        raise Stop

    def _check_prompt(self, what: str) -> None:
        if self._state.identity.joint:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{what}, and tracer.invoke() without a prompt has none; write it in the blocks of the prompts",
            )

    def advance(self, node: Node) -> None:
        """Move on to a module's next step."""
        self._offsets[node.path] = self._offsets.get(node.path, 0) + 1

    def await_step(self, step: int, coming: Iterator[int]) -> int | None:
        """Wait until a step begins, or until a plan has run it.

        As of `executor.block.interface.Block`.
        """
        waits, progress = self._state.waits, self._state.progress
        if step < progress.step:
            raise Refusal(
                pb.ERROR_CODE_OUT_OF_ORDER,
                f"step {step} had already passed (the block is in step {progress.step}); "
                + (
                    "read tracer.result last: it waits for the end"
                    if waits.result_asked
                    else "go through steps in rising order"
                ),
                location=f"tracer.iter[{step}]",
            )
        if step > progress.step:
            self.missed = step
            if progress.finished:
                return None
            looping = sys._getframe(2)  # below the loop's iterator
            self.loop = Loop(coming, step, looping.f_lineno if looping.f_code is self._program.code else 0)
            answer = self._park(Location("", Kind.STEP, step))
            if isinstance(answer, Passed):
                if answer.step is None:
                    return LOOP_OVER
                step = answer.step
            elif not answer:
                self.missed = self.loop.asked
                return None
        self.pointer = step
        self._offsets.clear()
        return step

    def await_result(self) -> Any:
        """Wait for the end of the generation and return its result."""
        waits, progress = self._state.waits, self._state.progress
        waits.result_asked = waits.result_asked or not progress.finished
        return progress.result if progress.finished else self._park(Location("", Kind.RESULT, 0))

    def _complete(self, node: Node, kind: str) -> Served:
        """Return what `_at` does, for an access to all rows."""
        served = self._at(node, kind)
        self._check_complete(node.path, f"{node.path}.{kind}")
        return served

    def _last_of(self, value: Any, path: str, location: str) -> Any:
        """Return a value of which the block may use the last rows, if it may use no others."""
        progress = self._state.progress
        if not (progress.last and self._in_prompt(path)):
            return value
        return last_of(value, progress.prompt_tokens, progress.last, location)

    def _check_complete(self, path: str, location: str) -> None:
        """Refuse an access to all rows of a prompt of which the block may get the last alone."""
        last = self._state.progress.last
        if last and self._in_prompt(path):
            raise refused(location, last)

    def _in_prompt(self, path: str) -> bool:
        """Return whether a module's value, at which the block is, is of the prompt's rows."""
        return self._state.progress.step == 0 and path not in PSEUDO

    def _at(self, node: Node, kind: str, owner: str | None = None, shown: str = "") -> Served:
        """Return what is served at a location, waiting for it if need be.

        Args:
            node: the module.
            kind: which of its locations.
            owner: the path that `next()` counts for, if another than the module's.
            shown: what errors call the location, if otherwise than by its raw name.
        """
        state, progress = self._state, self._state.progress
        step = self.pointer + self._offsets.get(node.path if owner is None else owner, 0)
        location = Location(node.path, kind, step, shown)
        if progress.served is not None and progress.served_at == location:
            progress.served.put_back()
            return progress.served
        position = self._tree.order_of(node.path, kind)
        if progress.finished:
            raise state.never(location)
        if location.step < progress.step or (location.step == progress.step and position <= progress.position):
            skipped = state.record.skips.around(node.path, location.step)
            if skipped:
                raise Refusal(
                    pb.ERROR_CODE_OUT_OF_ORDER,
                    f"{location} lies in {skipped}, which the block skipped in this step: nothing is computed there",
                    location=str(location),
                )
            at = (
                f" (the block is at {progress.served_at})"
                if progress.served_at
                else f" (the request is in step {progress.step})"
            )
            raise Refusal(
                pb.ERROR_CODE_OUT_OF_ORDER,
                f"{location} had already passed when it was asked for{at}; ask for locations in the order the model runs "
                "them, and keep a value in a variable if it is needed again",
                location=str(location),
            )
        return self._park(location)

    def _park(self, location: Location) -> Any:
        state = self._state
        self.fiber.check_modes(location, location)
        state.record.stale_writes.check_recent()
        state.waits.location = location
        try:
            return self.fiber.park(location)
        finally:
            state.waits.location = None
