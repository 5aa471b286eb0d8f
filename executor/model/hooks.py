"""Hooks on exactly the modules that a block waits for in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from executor.model.node import Node
from executor.model.streams import StepStream
from executor.model.tree import ModuleTree

# Called with a module's node, "input" or "output", and the value there; returns the value that the model goes on with.
Visit = Callable[[Node, str, Any], Any]
# A hook: a module's path, and "input" or "output".
Spot = tuple[str, str]


class Hooks:
    """The hooks of one step.

    Args:
        tree: the model's modules.
        visit: called when the model is at a hooked location.

    Attributes:
        tree: as given.
        asked: the hooks that were asked for in this step, or in the last one between two steps.
        assigned: the hooks of these that returned another value than they were given.
    """

    def __init__(self, tree: ModuleTree, visit: Visit) -> None:
        self.tree = tree
        self.asked: dict[Spot, None] = {}
        self.assigned: set[Spot] = set()
        self._held = False
        self._stream = StepStream(tree.device)
        self._at_location = visit
        self._hooked: dict[tuple[str, str], Any] = {}
        self._guards: dict[str, Any] = {}
        self._muted = False
        self._kept: set[str] = set()

    def begin_step(self) -> None:
        """Begin a step on the device's current stream."""
        self._stream.begin()
        self.asked.clear()
        self.assigned.clear()
        self._forget()

    def hold(self) -> None:
        """Have the hooks of the coming step noted, and none registered, until `release` or `clear`."""
        self._held = True

    def release(self) -> None:
        """Register the hooks that were asked for."""
        self._held = False
        for path, kind in self.asked:
            self._register(path, kind)

    def come(self, node: Node, kind: str, value: Any) -> Any:
        """Visit a location that the model has come to; return what the model goes on with."""
        found = self._stream.visit(lambda: self._at_location(node, kind, value))
        if found is not value and kind not in node.computed:
            self.assigned.add((node.path, kind))
        if node.path in self._kept and kind == "output":
            node.kept = found
        return found

    def _forget(self) -> None:
        """Drop what modules returned in an earlier step."""
        for path in self._kept:
            self.tree.nodes[path].kept = None
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._hooked) + len(self._guards)

    def add(self, path: str, kind: str) -> None:
        """Visit a module's input, output or computed value when the model is there.

        A second call does nothing. If another pipeline stage has the module, that stage announces the location.
        """
        if not self.tree.here(path, kind):
            return
        node = self.tree.nodes[path]
        for needed in (*node.beside, *(node.computed[kind].needs if kind in node.computed else ())):
            self._kept.add(needed.path)
            if needed is not node or kind != "output":
                self.add(needed.path, "output")
        key = (path, "output" if kind in node.computed else kind)
        if key in self.asked:
            return
        self.asked[key] = None
        if not self._held:
            self._register(*key)

    def _register(self, path: str, kind: str) -> None:
        node, key = self.tree.nodes[path], (path, kind)
        module = node.module
        if key in self._hooked:
            return
        assert module is not None
        self._guard_callers(path)
        if kind == "input":
            self._hooked[key] = module.register_forward_pre_hook(
                lambda _, args, kwargs: None if self._muted else self.come(node, kind, (args, kwargs)),
                with_kwargs=True,
            )
        elif node.computed:
            self._hooked[key] = module.register_forward_hook(
                lambda _, args, kwargs, output: self._after(node, (args, kwargs), output), with_kwargs=True
            )
        else:
            self._hooked[key] = module.register_forward_hook(
                lambda _, args, output: None if self._muted else self.come(node, kind, output)
            )

    def _after(self, node: Node, given: Any, output: Any) -> Any:
        """Visit the values computed from a module's input and output, then the output.

        The model never holds the computed values. One hook does both: a hook that is registered while a module's hooks are
        called waits for the module's next call.
        """
        if self._muted:
            return None
        for kind in node.computed:
            self.come(node, kind, (given, output))
        return self.come(node, "output", output)

    def clear(self) -> None:
        """Remove all hooks."""
        self._held = False
        for handle in (*self._hooked.values(), *self._guards.values()):
            handle.remove()
        self._hooked.clear()
        self._guards.clear()
        self._forget()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Return a context in which module calls are not part of the step and visit nothing."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def _guard_callers(self, path: str) -> None:
        """Make torch look for hooks again when the modules around this module return.

        A module that is called while it has no hooks takes a path on which a hook registered during the call never fires. A
        block may ask for the output of a module only after it was served inside the module. So these modules get a hook that
        does nothing.
        """
        for around in self.tree.around(path):
            if around in self._guards:
                continue
            module = self.tree.nodes[around].module
            assert module is not None
            self._guards[around] = module.register_forward_pre_hook(_nothing)


def _nothing(module: torch.nn.Module, args: Any) -> None:
    return None
