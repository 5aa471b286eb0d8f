"""Steps in segments on CPUs, which have no graphs: the model's pass waits in a greenlet at each break.

The decision, the breaks, the serving and the second, eager pass are those of the engine on GPUs.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import greenlet
import torch
from vllm.forward_context import get_forward_context

from executor.graphs.cache import GraphCache, Key
from executor.graphs.capture import Captured
from executor.graphs.dispatch import Dispatcher, Kind, Step
from executor.graphs.segments import Asked, Break, Breaks, run
from executor.model.hooks import Hooks
from executor.model.node import Node
from executor.model.tree import ModuleTree


class LivePass:
    """A pass of the model that waits at its breaks.

    Args:
        forward: runs the model.
        tree: its modules.
        breaks: where it waits.
        rows: the rows of the batch's tensors.

    Attributes:
        output: what the model gave, when the pass is over.
    """

    def __init__(self, forward: Callable[[], Any], tree: ModuleTree, breaks: Breaks, rows: int) -> None:
        self.spots = breaks.spots
        self.output: Any = None
        self._forward = forward
        self._breaks = breaks
        self._rows = rows
        self._here: list[tuple[Node, str, Any]] = []
        self._hooks = Hooks(tree, self._come)
        for spot in breaks.spots:
            self._hooks.add(*spot)
        self._outside = greenlet.getcurrent()
        self._inside = greenlet.greenlet(self._run)
        self._inside.gr_context = contextvars.copy_context()  # of the kernels that the step takes

    def go_on(self) -> Break | None:
        self._outside = greenlet.getcurrent()
        at: Break | None = self._inside.switch()
        return at

    def give_up(self) -> None:
        self._inside.throw()
        self._hooks.clear()

    def _run(self) -> None:
        self.output = self._forward()
        self._hooks.clear()

    def _come(self, node: Node, kind: str, value: Any) -> Any:
        if greenlet.getcurrent() is not self._inside:  # a block applies the module
            return value
        self._here.append((node, kind, value))
        if kind in node.computed:
            return value
        spot = (node.path, kind)
        at = Break.of(spot, self._here, spot in self._breaks.apart, self._rows)
        self._here = []
        self._outside.switch(at)
        at.keep()
        return at.onward


class Segmented:
    """Runs the steps with blocks of one runner on a CPU in segments.

    Args:
        runner: the V1 runner.
        stock: runs the model once, with the arguments of `_model_forward`.

    Attributes:
        dispatcher: decides for each step.
    """

    def __init__(self, runner: Any, stock: Callable[..., Any]) -> None:
        self._runner = runner
        self._stock = stock
        self._asked = Asked()
        self.dispatcher = Dispatcher(self, GraphCache(64, 1 << 20), prompts=True)

    @classmethod
    def of(cls, runner: Any) -> Segmented:
        """Have a runner's steps with blocks run in segments."""
        from executor.plugin.runner_v1 import InterleavingRunnerV1

        ours = runner._model_forward
        made = cls(runner, super(InterleavingRunnerV1, runner)._model_forward)
        runner._model_forward = lambda *args, **kwargs: (made if runner.tracing else ours)(*args, **kwargs)
        return made

    # What the dispatcher calls.

    def capture(self, key: Key) -> Captured:
        return Captured(SimpleNamespace(key=key), 1)

    def replay(self, graph: Any) -> None:
        raise AssertionError("a step with blocks is no single graph")

    def agrees(self, graph: Any, key: Key) -> bool:
        return True

    # What the runner calls.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner, interleaver = self._runner, self._runner.interleaver
        get_forward_context().skip_compiled = True
        rows = next(one.shape[0] for one in kwargs.values() if isinstance(one, torch.Tensor))
        loops, hooks, riding = interleaver.loops, interleaver.hooks, runner.riding
        sites = loops.sites_of(riding) if riding else frozenset()
        programs = loops.programs_of(riding) if riding else frozenset()
        self._asked.note(hooks.asked, hooks.assigned)
        general = "loops run beside blocks at no site" if riding and not sites else ""
        decision = self.dispatcher.decide(Step(rows, True, sites, programs, self._asked.breaks, general))
        given: list[Any] = []

        def forward() -> Any:
            return self._stock(*args, **kwargs)

        try:
            with runner._tables_of(interleaver, rows, runner._apart):
                segments = None
                if decision.kind is Kind.SEGMENTS:
                    assert decision.entry is not None and self.dispatcher.check(decision.entry)
                    breaks = decision.entry.key.breaks
                    assert breaks is not None
                    segments = LivePass(forward, hooks.tree, breaks, rows)
                complete = run(
                    segments,
                    hooks,
                    lambda: interleaver.begin_step(runner._batch(rows)),
                    lambda: given.append(forward()),
                )
                if segments is not None:
                    self.dispatcher.ran(complete)
                    if complete:
                        given.append(segments.output)
            interleaver.check_cache()
            return given[0]
        finally:
            interleaver.end_forward()
