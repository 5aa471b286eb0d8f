"""The names a block uses inside a worker: modules, the tracer, and steps.

Every access goes to the block that is running (`executor.block.interface`), so one tree of envoys serves all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from executor.block.fiber import current
from executor.block.interface import LOOP_OVER
from executor.core.errors import Refusal
from executor.model.module_name import ModuleName
from executor.model.node import View
from executor.model.packed import why_packed
from executor.model.parameters import refuse_write
from executor.model.remote_module import names_of
from executor.views.view import Part, tensor_at
from interpose.contract.cache import Cache
from interpose.contract.idioms import OF_MODELS, OF_TRACERS
from interpose.contract.names import not_assigned, of_tensors
from interpose.v1 import trace_pb2 as pb


class Envoy(ModuleName):
    """A module of the served model, inside a block.

    Args:
        as of `ModuleName`.

    Attributes:
        output: what the module returned, as the model's own code returned it; read, change in place, or assign.
        input: its first positional argument.
        inputs: `(args, kwargs)`.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        node = self._node
        view = node.views.get(name)
        if view is not None:
            return current().read_view(view)
        child = node.children.get(name)
        if child is None and node is self._tree.root:
            child = self._tree.pseudo.get(name)
        if child is None:
            if node.layer is not None and name in names_of(node.layer):
                return current().parameter(node, name)
            packed = why_packed(node, name)
            if packed is not None:
                raise packed
            if node.path and name not in OF_MODELS and (of_tensors(name) or hasattr(torch.Tensor, name)):
                raise self.misuse(f"asked for {name!r}", f".{name}")
            raise self._tree.unknown(node, name)
        return Envoy(self._tree, child)

    def __getitem__(self, key: int | slice) -> Envoy | list[Envoy]:
        count = self._count()
        if not count:
            self._misused("indexed", f"[{key}]" if isinstance(key, int) else "[…]")
        if isinstance(key, slice):
            return [Envoy(self._tree, self._node.children[str(i)]) for i in range(*key.indices(count))]
        index = key + count if isinstance(key, int) and key < 0 else key
        child = self._node.children.get(str(index))
        if child is None:
            raise self._tree.unknown(self._node, str(key))
        return Envoy(self._tree, child)

    def _count(self) -> int:
        return sum(name.isdigit() for name in self._node.children)

    def __len__(self) -> int:
        return self._count() or self._misused("measured by len()")

    def __iter__(self) -> Iterator[Envoy]:
        if not self._count():
            self._misused("gone through")
        return (Envoy(self._tree, child) for name, child in self._node.children.items() if name.isdigit())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module to values of the block; return its result as the block's own tensors.

        The result is whole over the ranks.

        A canonical module gives what its `output` is, also where the engine's returns something beside it.
        """
        result = current().apply(self._node.applies or self._node, args, kwargs)
        view = self._node.views.get("output")
        if isinstance(result, tuple) and isinstance(view, Part) and len(args) + len(kwargs) == 1:
            return tensor_at(result, view.at)
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        view = self._view(name)
        if view is not None:
            current().write_view(view, value)
        elif name == "output":
            current().write(self._node, "output", value)
        elif name == "input":
            current().write_input(self._node, value)
        elif name == "inputs":
            current().write(self._node, "input", value)
        else:
            node = self._node
            known = name in node.children or (node is self._tree.root and name in self._tree.pseudo)
            if node.layer is not None and name in names_of(node.layer):
                raise refuse_write(node.path, name)
            message = f"{name!r} cannot be assigned on a module; its output, input and inputs can"
            if known:
                message = not_assigned(f"{node.path}.{name}" if node.path else name)
            raise Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=node.path)

    @property
    def output(self) -> Any:
        view = self._view("output")
        return current().read(self._node, "output") if view is None else current().read_view(view)

    @property
    def inputs(self) -> Any:
        view = self._view("inputs")
        return current().read(self._node, "input") if view is None else current().read_view(view)

    @property
    def input(self) -> Any:
        view = self._view("input")
        return current().read_input(self._node) if view is None else current().read_view(view)

    def _view(self, name: str) -> View | None:
        """Return the canonical value of a name, or None on a module, whose values are raw."""
        node = self._node
        view = node.views.get(name)
        if view is None and node.title:
            raise self._tree.unknown(node, name)
        return view

    def skip(self, value: Any) -> None:
        """Replace the module's output by `value`, as if the module did not run.

        `value` has the form of the module's own output.

        The block goes on at the module's output. A module that holds attention must be skipped in every later step too.
        """
        current().skip(self._node, value)

    def next(self) -> Envoy:
        """Move on to this module's next step."""
        current().advance(self._node)
        return self


_NEVER = 1 << 62


class Iterations:
    """The steps of the generation: `tracer.iter[a:b]`, `tracer.iter[i]` or `tracer.iter[:]`.

    Each turn waits until its step begins, so an open end stops when the generation does, and the code after the loop runs.
    """

    def __init__(self, key: slice | int | list[int] = slice(None)) -> None:
        self._key = key

    def __getitem__(self, key: slice | int | list[int]) -> Iterations:
        numbers = [key.start, key.stop, key.step] if isinstance(key, slice) else key if isinstance(key, list) else [key]
        if any(number is not None and (not isinstance(number, int) or number < 0) for number in numbers):
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT, "tracer.iter takes steps counted from 0: iter[2], iter[1:4], iter[:]"
            )
        return Iterations(key)

    def _steps(self) -> Iterator[int]:
        key = self._key
        if isinstance(key, slice):  # a range shows what comes without a look at each step
            return iter(range(key.start or 0, _NEVER if key.stop is None else key.stop, key.step or 1))
        return iter(key if isinstance(key, list) else [key])

    def __iter__(self) -> Iterator[int]:
        block = current()
        bounded = not isinstance(self._key, slice) or self._key.stop is not None
        exact = not isinstance(self._key, slice)
        before = block.pointer
        try:
            coming = self._steps()
            for step in coming:
                begun = block.await_step(step, coming)
                if begun == LOOP_OVER:
                    return
                if begun is None:
                    if exact:
                        raise Refusal(
                            pb.ERROR_CODE_UNKNOWN_LOCATION,
                            f"step {block.missed} was never reached: the generation ended after {block.steps} steps",
                            location=f"tracer.iter[{block.missed}]",
                        )
                    if bounded:
                        block.log(
                            f"tracer.iter: the generation ended after {block.steps} steps, before step {block.missed}\n"
                        )
                    return
                yield begun
        finally:
            block.pointer = before


class Tracer:
    """The trace's `tracer`, inside a block."""

    __slots__ = ()

    @property
    def iter(self) -> Iterations:
        return Iterations()

    def all(self) -> Iterations:
        """Every step of the generation."""
        return Iterations()

    def stop(self) -> NoReturn:
        """End this request now; what was saved so far comes back."""
        current().stop()

    def log(self, *values: Any) -> None:
        """Write to the notebook while the trace runs, like print."""
        current().log(" ".join(str(value) for value in values) + "\n")

    def cache(
        self,
        modules: object = None,
        device: object = "cpu",
        dtype: object = None,
        detach: bool = True,
        include_output: bool = True,
        include_inputs: bool = False,
        non_blocking: bool = False,
    ) -> Cache:
        """Record many modules from here to the end of the generation, after all blocks' turns.

        The cache is saved: after the block `cache["model.layers.2"].output`, or `cache.model.layers[2].output`, is the value of
        this prompt's rows, as `.output` gives it, [tokens, …] in the first step and [1, …] in the later ones. With several steps
        it is a list with one value for each; `len(cache[path])` is their number.

        Args:
            modules: modules or paths; None: all that run, but for those in `cache.refused`.
            device: where tensors wait for the end: "cpu", or None for the engine's own device. They come to the notebook's CPU.
            dtype: what they become; None: as they are.
            detach, non_blocking: for code that names them; values are always snapshots without gradients.
            include_output, include_inputs: which of the modules' values.

        Raises:
            Refusal: a module is not reached, or is none; or the trace is streamed.
        """
        return current().record(modules, device, dtype, include_output, include_inputs)

    @property
    def result(self) -> Any:
        """The finished output: .text, .token_ids, .finish_reason.

        Reading it waits for the end of the generation.
        """
        return current().await_result()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT,
            f"tracer has no {name!r} in a block; "
            + OF_TRACERS.get(name, "it has iter, all(), cache(), stop(), log() and result"),
        )
