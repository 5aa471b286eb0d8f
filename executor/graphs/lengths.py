"""Makes the taps for a prompt out of those for a shorter and a longer prompt.

A plan is made for prompts of one length, and takes milliseconds. The code of a block that asks no tensor for its size does the
same whatever the length is: it saw no number that depends on it. So its program has the same operations for all lengths. What
differs is where rows begin and end. Such a bound is made of numbers, the length, and bounds of slices, which never leave the rows
that are there: it grows by at most one where the length grows by one. So a bound that is the same for two lengths is the same for
all lengths between them, and a bound that is as far from the end for both is so for all between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from executor.graphs.operands import Operand, Sketch
from executor.graphs.operations import ALL, Tap
from executor.graphs.template import Template
from executor.plan.ir import Plan

_MOST_TAPS = 64


class Apart(Exception):
    """The taps for two lengths differ in more than their rows."""


@dataclass(frozen=True)
class Between:
    """A length between two others.

    Attributes:
        low, high: the lengths that have taps.
        now: the length between them.
    """

    low: int
    high: int
    now: int

    def bound(self, one: int, other: int) -> int:
        """Return a row, or a number of rows, from what it is for the two lengths."""
        if one == other:
            return one
        if self.low - one == self.high - other:
            return self.now - (self.low - one)
        raise Apart


def between(low: tuple[Plan, Template], high: tuple[Plan, Template], rows: int) -> Template | None:
    """Return what a plan becomes for prompts of so many rows.

    Args:
        low, high: a region's plans for a shorter and a longer prompt of at least two rows, and what they have become.
        rows: of the prompt.

    Returns:
        What runs, with the inputs and outputs of `low`; None if it does not follow from the others.
    """
    (one, short), (other, long) = low, high
    if not 1 < one.rows < rows < other.rows or one.sized or other.sized or not alike(one, other):
        return None
    simple = all(made.tail is None and not made.probes for made in (short, long))
    if not simple or len(short.taps) != len(long.taps) or len(short.constants) != len(long.constants):
        return None
    at = Between(one.rows, other.rows, rows)
    try:
        nodes = _pairs(short, long)
        taps = tuple(_sketch(mine, theirs, nodes, at) for mine, theirs in zip(short.taps, long.taps, strict=True))
        if short.reads.keys() != long.reads.keys() or not _meet_alike(short.taps, long.taps, taps):
            return None
        reads = {output: _read(mine, long.reads[output], at) for output, mine in short.reads.items()}
    except Apart:
        return None
    return Template(taps, reads, short.constants, short.known, None, short.inputs, False)


def _meet_alike(*lengths: tuple[Sketch, ...]) -> bool:
    """Return whether the same taps have rows in common, for each length.

    Rows of a list may be counted from both ends: for some length between they could be the same row.
    """
    if len(lengths[0]) > _MOST_TAPS:
        return False
    found = [
        [
            one.tap.rows[0] < other.tap.rows[1] and other.tap.rows[0] < one.tap.rows[1]
            for i, one in enumerate(taps)
            for other in taps[:i]
            if one.tap.site == other.tap.site
        ]
        for taps in lengths
    ]
    return all(one == found[0] for one in found)


def alike(one: Plan, other: Plan) -> bool:
    """Return whether two plans of a region leave the block the same things."""
    read = [[(read.path, read.kind, read.inputs) for read in plan.reads] for plan in (one, other)]
    left = [(plan.inputs, plan.writes, plan.appends, plan.results, plan.dropped, plan.carried) for plan in (one, other)]
    return read[0] == read[1] and left[0] == left[1] and not one.carried


def _pairs(short: Template, long: Template) -> Mapping[fx.Node, fx.Node]:
    """Return the constants of one program with those of the other that are the same.

    Raises:
        Apart: they are not.
    """
    if short.inputs.keys() != long.inputs.keys() or short.known.keys() != long.known.keys():
        raise Apart
    nodes = {node: long.inputs[index] for index, node in short.inputs.items()}
    for mine, theirs in zip(short.constants, long.constants, strict=True):
        args = fx.node.map_arg((mine.args, mine.kwargs), nodes.__getitem__)
        if mine.target is not theirs.target or args != (theirs.args, theirs.kwargs):
            raise Apart
        nodes[mine] = theirs
    for mine, theirs in nodes.items():
        one, other = mine.meta["val"], theirs.meta["val"]
        if (one.shape, one.dtype, one.stride()) != (other.shape, other.dtype, other.stride()):
            raise Apart
    if any(nodes[node] is not long.known[output] for output, node in short.known.items()):
        raise Apart
    return nodes


def _sketch(mine: Sketch, theirs: Sketch, nodes: Mapping[fx.Node, fx.Node], at: Between) -> Sketch:
    if _content(mine.tap) != _content(theirs.tap) or (mine.operand is None) != (theirs.operand is None):
        raise Apart
    first, after = (at.bound(*pair) for pair in zip(mine.tap.rows, theirs.tap.rows, strict=True))
    if not 0 <= first < after or not (after == ALL or after <= at.now):
        raise Apart
    return Sketch(replace(mine.tap, rows=(first, after)), _operand(mine.operand, theirs.operand, nodes, at))


def _operand(
    mine: Operand | None, theirs: Operand | None, nodes: Mapping[fx.Node, fx.Node], at: Between
) -> Operand | None:
    if mine is None or theirs is None:
        return None
    if nodes[mine.node] is not theirs.node or len(mine.shape) != len(theirs.shape):
        raise Apart
    shape = mine.shape
    if not mine.flat:
        shape = (at.bound(mine.shape[0], theirs.shape[0]), *mine.shape[1:])
    start = at.bound(mine.start, theirs.start)
    lines = None
    if mine.lines is not None and theirs.lines is not None:
        first, after = (at.bound(*pair) for pair in zip(mine.lines, theirs.lines, strict=True))
        lines = first, after
    made = replace(mine, shape=shape, start=start, lines=lines)
    same = replace(theirs, node=mine.node, shape=(*shape[:1], *theirs.shape[1:]), start=start, lines=lines)
    if (mine.lines is None) != (theirs.lines is None) or (mine.flat and shape != theirs.shape) or made != same:
        raise Apart
    return made


def _read(mine: tuple[int, tuple[int, ...]], theirs: Any, at: Between) -> tuple[int, tuple[int, ...]]:
    """Return the tap of an output and its shape, whose first number may count rows."""
    (tap, shape), (other, long) = mine, theirs
    if tap != other or len(shape) != len(long) or shape[1:] != long[1:]:
        raise Apart
    return tap, ((at.bound(shape[0], long[0]), *shape[1:]) if shape else ())


def _content(tap: Tap) -> tuple[object, ...]:
    """Return what a tap without an operand does, whatever its rows."""
    if tap.vector is not None or tap.direction is not None:
        raise Apart
    return tap.site, tap.code, tap.columns, tap.steps, tap.number.hex(), tap.coefficients, tap.low, tap.high
