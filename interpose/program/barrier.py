"""A meeting point for the invokes of one trace: `barrier = tracer.barrier(2)`, then `barrier()` in two of its blocks."""

from __future__ import annotations

from typing import NoReturn

from interpose.contract.errors import InvalidArgument


class Barrier:
    """Lets invokes wait for each other; made by `tracer.barrier`.

    Args:
        tracer: the trace that it belongs to.
        number: which of the trace's barriers it is.
        count: how many blocks go on together.
    """

    def __init__(self, tracer: object, number: int, count: int) -> None:
        self.tracer = tracer
        self.number = number
        self.count = count

    def __call__(self) -> NoReturn:
        """Wait until `count` blocks are here; inside `with tracer.invoke(prompt):` only."""
        raise InvalidArgument(
            "barrier() waits for the other invokes of its trace: call it inside `with tracer.invoke(prompt):`"
        )

    def __repr__(self) -> str:
        return f"<barrier of {self.count} invokes>"
