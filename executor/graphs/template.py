"""A plan in the tables: as it is for all requests, and with the constants of one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from executor.graphs.operands import Sketch, values_of
from executor.graphs.operations import Refused, Tap
from executor.graphs.tail import Tail
from executor.plan.ir import Plan

_MOST_SPANS = 8  # spans of steps whose taps a template remembers


@dataclass(frozen=True)
class Lowered:
    """A plan in the tables.

    Attributes:
        taps: for `Tables.join`.
        reads: for each output of the plan that a tap reads, the number of the tap, and the shape of the output.
        known: the outputs that are constants.
        tail: what the host computes of what the taps read; None: nothing.
    """

    taps: tuple[Tap, ...]
    reads: Mapping[int, tuple[int, tuple[int, ...]]]
    known: Mapping[int, torch.Tensor]
    tail: Tail | None = None

    def values(self, stacked: Callable[[int], torch.Tensor], steps: int) -> dict[int, torch.Tensor]:
        """Return the outputs of the plan in all steps: [steps, ...] each.

        Args:
            stacked: returns what a tap read: [steps, rows, columns], all on one device.
            steps: how many steps; at least one.
        """
        made = {tap: stacked(tap) for tap in dict.fromkeys(self._read())}
        found = {output: made[tap].reshape(steps, *shape) for output, (tap, shape) in self.reads.items()}
        found |= {output: known.expand(steps, *known.shape) for output, known in self.known.items()}
        return found if self.tail is None else found | self.tail.run(made.__getitem__, steps)

    def going_on(self, plan: Plan, names: Mapping[str, torch.Tensor]) -> Lowered:  # any shape
        """Return the same, with what the steps before left for its first step.

        Args:
            plan: the plan that it is of.
            names: the tensors of `plan.carried`, by name.
        """
        if self.tail is None or not self.tail.passed:
            return self
        now = {one.into: names[own.name] for one, own in zip(self.tail.passed, plan.carried, strict=True)}
        return replace(self, tail=replace(self.tail, values={**self.tail.values, **now}))

    def _read(self) -> Iterator[int]:
        yield from (tap for tap, _ in self.reads.values())
        if self.tail is not None:
            yield from (tap for tap, _ in self.tail.given.values())


@dataclass(frozen=True)
class Template:
    """A plan in the tables, before its constants are known.

    Attributes:
        taps: the operations, in the order in which they run.
        reads: as of `Lowered`.
        constants: the nodes that are needed of constants, in the order of the program.
        known: for each output that is a constant, its node.
        tail: what the host computes, without its constants and what the first step gets.
        inputs: the inputs of the program that are constants, by their index.
        probes: whether the tail may fail for what its constants are.
        latest: the taps without constants, by their steps.
    """

    taps: tuple[Sketch, ...]
    reads: Mapping[int, tuple[int, tuple[int, ...]]]
    constants: tuple[fx.Node, ...]
    known: Mapping[int, fx.Node]
    tail: Tail | None
    inputs: Mapping[int, fx.Node]
    probes: bool
    latest: dict[tuple[int, int], tuple[Tap, ...]] = field(default_factory=dict)

    def filled(self, given: Mapping[int, torch.Tensor], steps: tuple[int, int]) -> Lowered:  # any shape
        """Return the taps of a request.

        Args:
            given: the tensors of the program's inputs that are no locations, by the index of the input.
            steps: the first step and the step after the last.

        Raises:
            Refused: the constants do not fit.
        """
        bare = self.latest.get(steps)
        if bare is None:
            bare = tuple(replace(one.tap, steps=steps) for one in self.taps)
            if len(self.latest) == _MOST_SPANS:
                del self.latest[next(iter(self.latest))]
            self.latest[steps] = bare
        if not self.inputs and not self.constants:
            return Lowered(bare, self.reads, {}, self.tail)
        values = values_of(self.constants, {node: given[index] for index, node in self.inputs.items()})
        taps = [
            tap if one.operand is None else replace(tap, **one.operand.of(values[one.operand.node]))
            for tap, one in zip(bare, self.taps, strict=True)
        ]
        tail = self.tail and self.tail.filled(values)
        if tail is not None and self.probes:
            _probe(tail)
        return Lowered(tuple(taps), self.reads, {i: values[node] for i, node in self.known.items()}, tail)


def _probe(tail: Tail) -> None:
    """Refuse a tail that fails for what its constants are, such as an index out of bounds."""
    rows = {tap: torch.zeros(1, *shape, dtype=node.meta["val"].dtype) for node, (tap, shape) in tail.given.items()}
    try:
        tail.run(rows.__getitem__, 1)
    except (IndexError, RuntimeError) as error:
        raise Refused(f"the block's own code fails ({error})") from None
