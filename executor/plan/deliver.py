"""Makes the values that one request gets of a step, from the outputs of its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from executor.plan.environment import Environment
from executor.plan.ir import Append, Item

# Called with a value that the block saved, and with what it is sent as (`SaveRegistry.mark`).
Mark = Callable[[Any, Any], None]


class Delivery:
    """Makes the values of one step of one request.

    Args:
        result: returns an output of the plan's program.
        step: the step.
        mark: notes a saved value.
    """

    def __init__(self, result: Callable[[int], torch.Tensor], step: int, mark: Mark) -> None:
        self._result = result
        self._step = step
        self._mark = mark
        self._tensors: dict[int, torch.Tensor] = {}

    def tensor(self, output: int) -> torch.Tensor:
        """Return an output, the same object each time."""
        if output not in self._tensors:
            self._tensors[output] = self._result(output)
        return self._tensors[output]

    def value(self, item: Item) -> Any:
        """Return the value of an item."""
        made: Any
        if item.kind == "tensor":
            made = self.tensor(item.output)
            if item.saved:
                self._mark(made, self.tensor(item.snapshot) if item.snapshot >= 0 else made)
            return made
        if item.kind == "number":
            assert item.number is not None
            made = item.number.of(self._step)
        elif item.kind == "scalar":
            made = self.tensor(item.output).item()
        elif item.kind == "value":
            made = item.value
        elif item.kind == "dict":
            made = {self.value(key): self.value(one) for key, one in zip(item.keys, item.items, strict=True)}
        else:
            made = (list if item.kind == "list" else tuple)(map(self.value, item.items))
        if item.saved:
            self._mark(made, made)
        return made

    def add(self, append: Append, environment: Environment) -> None:
        """Add to a list, or put into a dict, if the block does."""
        if append.when >= 0 and not self.tensor(append.when).item():
            return
        container, made = environment.written[append.container], self.value(append.item)
        if append.key is None:
            container.append(made)
        else:
            container[self.value(append.key)] = made
