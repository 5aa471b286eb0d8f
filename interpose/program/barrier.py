"""Barriers for the invokes of one trace: `barrier = tracer.barrier(2)`, then `barrier()`."""

from __future__ import annotations

from typing import NoReturn

from interpose.contract.errors import InvalidArgument


class Barrier:
    """A place where invokes wait for each other; made by `tracer.barrier`.

    Args:
        tracer: the tracer of the trace.
        number: index of the barrier in its trace.
        count: the number of blocks that wait for each other.
    """

    def __init__(self, tracer: object, number: int, count: int) -> None:
        self.tracer = tracer
        self.number = number
        self.count = count

    def __call__(self) -> NoReturn:
        """Wait until `count` blocks have come; inside `with tracer.invoke(prompt):` only."""
        raise InvalidArgument(
            "barrier() waits for the other invokes of its trace: call it inside `with tracer.invoke(prompt):`"
        )

    def __repr__(self) -> str:
        return f"<barrier of {self.count} invokes>"
