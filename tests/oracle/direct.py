"""Runs the body of a block directly, in turns with transformers' forward pass, without anything of the product.

The body is ordinary code in a greenlet. It parks where it asks for a location; the oracle's edits resume it there with the
value, and go on with what it made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from greenlet import greenlet

from tests.oracle.location import Edit
from tests.oracle.model import Oracle

_STEP = "a step"


class Spot:
    """A module's output, as the body names it."""

    def __init__(self, direct: Direct, path: str) -> None:
        object.__setattr__(self, "_direct", direct)
        object.__setattr__(self, "_path", path)

    @property
    def output(self) -> Any:
        self._direct.reach(self._path)
        return self._direct.value

    def __setattr__(self, name: str, value: Any) -> None:
        assert name == "output"
        self._direct.reach(self._path)
        self._direct.value = value


class Direct:
    """One run of a body.

    Args:
        oracle: the model.
        paths: the locations that the body may ask for, in the order of execution.

    Attributes:
        value: at the location that the body is at; it may replace it.
    """

    def __init__(self, oracle: Oracle, paths: Sequence[str]) -> None:
        self.value: Any = None
        self._oracle = oracle
        self._paths = list(paths)
        self._served: Any = None
        self._at: tuple[str, int] | None = None
        self._waiting: tuple[str, int] | None = None
        self._step = -1
        self._pointer = 0
        self._saved: dict[int, tuple[Any, Any]] = {}

    def run(self, source: str, names: dict[str, Any], prompt: list[int], steps: int) -> dict[str, Any]:
        """Execute the body; return its names, saved tensors as they were when they were saved.

        The body finds its locations in the list `spots`, the steps as ``steps(n)``, and saves with ``keep(x)``.
        """
        spots = [Spot(self, path) for path in self._paths]
        namespace = {**names, "spots": spots, "steps": self._steps, "keep": self._keep}
        self._body = greenlet(lambda: exec(compile(source, "<direct>", "exec"), namespace))
        self._waiting = self._body.switch()
        edits = [Edit(path, "output", lambda value, path=path: self._visit(path, value)) for path in self._paths]
        self._oracle.run(prompt, steps, edits)
        while not self._body.dead:
            assert self._waiting is not None and self._waiting[0] == _STEP, f"never reached: {self._waiting}"
            self._waiting = self._body.switch(False)
        return {
            name: self._resolved(value) for name, value in namespace.items() if name not in ("spots", "__builtins__")
        }

    def reach(self, path: str) -> None:
        """Wait until the model is at a location of the current step."""
        if self._at != (path, self._pointer):
            self._body.parent.switch((path, self._pointer))

    def _steps(self, count: int) -> Iterator[int]:
        for step in range(count):
            if step > self._step and not self._body.parent.switch((_STEP, step)):
                return
            self._pointer = step
            yield step
        self._pointer = 0

    def _visit(self, path: str, value: Any) -> Any:
        if path == self._paths[0]:
            self._step += 1
            if self._waiting == (_STEP, self._step):
                self._waiting = self._body.switch(True)
        if self._waiting != (path, self._step):
            return value
        self.value = self._served = value
        self._at = (path, self._step)
        self._waiting = self._body.switch()
        self._at = None
        return self.value

    def _keep(self, value: Any) -> Any:
        snapshot = value
        if isinstance(value, torch.Tensor) and self._at is not None:
            shared = value.untyped_storage().data_ptr() == self._served.untyped_storage().data_ptr()
            snapshot = value.clone() if shared else value
            value = value.view_as(value) if shared else value
        self._saved[id(value)] = (value, snapshot)
        return value

    def _resolved(self, value: Any) -> Any:
        if id(value) in self._saved and isinstance(value, torch.Tensor):
            return self._saved[id(value)][1]
        if isinstance(value, dict):
            return {key: self._resolved(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._resolved(item) for item in value])
        return value
