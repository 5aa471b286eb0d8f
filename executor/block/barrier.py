"""Barriers as the code of blocks sees them: invokes wait for each other in a step.

A block that comes to a barrier parks. The interleaver says when blocks go on from there, and when no block passes the barrier
any more (`executor.interleave.machine.barriers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from executor.core.errors import Refusal
from interpose.v1 import trace_pb2 as pb


@dataclass(eq=False)
class Barrier:
    """One barrier of a trace, inside its blocks: `barrier()`.

    Attributes:
        number: the index among the trace's barriers.
        count: how many blocks go on together.
        broken: why no block can pass the barrier any more, "" as long as that is possible.
    """

    number: int
    count: int
    _wait: Callable[[Barrier], None] = field(repr=False)
    broken: str = ""

    def __call__(self) -> None:
        """Wait until `count` blocks are here."""
        self._wait(self)

    def __str__(self) -> str:
        return f"barrier {self.number + 1} (of {self.count})"

    def refusal(self) -> Refusal:
        """Return why no block passes the barrier any more; each block gets an error of its own."""
        return _refuse(self.broken)

    def ended(self) -> Refusal:
        """Return why a block waits no longer when its generation is over."""
        return _refuse(
            f"the generation ended while the block waited at {self}: it counts {self.count} blocks, and they did not all come"
        )

    def after_generation(self) -> Refusal:
        """Return why a block cannot wait after its generation."""
        return _refuse(f"the generation had ended when the block came to {self}; call it before tracer.result")


def _refuse(message: str) -> Refusal:
    return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location="barrier()")
