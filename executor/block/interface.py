"""What the names in a block can ask of the block that is running.

A call that needs a value of the model waits for it: the block parks, and the call returns when the model has come there. A call
for something that cannot be given raises a `Refusal` at the block's own line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from executor.block.barrier import Barrier
from executor.model.node import Node, View
from interpose.contract.cache import Cache

LOOP_OVER = -1


class Block(Protocol):
    """A block that is running.

    Attributes:
        pointer: the step that locations are asked for in.
        missed: the step that a loop asked for when the generation ended.
        steps: how many steps have begun.
    """

    pointer: int
    missed: int

    @property
    def steps(self) -> int: ...

    def read(self, node: Node, kind: str) -> Any:
        """Return the value at a module's input or output."""

    def read_view(self, view: View) -> Any:
        """Return a canonical value."""

    def read_input(self, node: Node) -> Any:
        """Return a module's first argument."""

    def write(self, node: Node, kind: str, value: Any) -> None:
        """Replace the value at a module's input or output."""

    def write_view(self, view: View, value: Any) -> None:
        """Replace a canonical value."""

    def write_input(self, node: Node, value: Any) -> None:
        """Replace a module's first argument."""

    def skip(self, node: Node, value: Any) -> None:
        """Have a module's output be `value`, whatever the module makes."""

    def apply(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a module makes of the block's own values."""

    def parameter(self, node: Node, name: str) -> Any:
        """Return a weight of a module: a tensor, or what gives its rows."""

    def await_barrier(self, barrier: Barrier) -> None:
        """Wait until as many invokes have come to a barrier as it counts."""

    def await_step(self, step: int, coming: Iterator[int]) -> int | None:
        """Wait until a step begins.

        Args:
            step: the step.
            coming: gives the steps of the loop after it.

        Returns:
            The step that has begun: `step`, or a later step when a plan has run the steps before it; None if the generation ended
            before; `LOOP_OVER` when a plan has run the last step of the loop.
        """

    def await_result(self) -> Any:
        """Wait for the end of the generation and return its result."""

    def advance(self, node: Node) -> None:
        """Move on to a module's next step."""

    def log(self, text: str) -> None:
        """Send text to the notebook."""

    def save(self, value: Any) -> Any:
        """Keep a value past the block; return what the block goes on with."""

    def record(
        self, modules: object, device: object, dtype: object, include_output: bool, include_inputs: bool
    ) -> Cache:
        """Record modules from here on; return the cache that fills."""

    def stop(self) -> NoReturn:
        """End the request."""
