"""Which steps of a loop may run in the tables, and what counts of them."""

from __future__ import annotations

import copy
import itertools
import operator
import zlib

from executor.block.api import Loop
from executor.block.tally import Tally
from executor.graphs.operations import ALL
from executor.graphs.table_loop import AHEAD, Left, Window
from executor.model.bits import digests
from executor.plan.ir import Plan
from executor.plan.run import Member, inputs_of

_RANGE = type(iter(range(1)))  # the iterators of loops over a slice of steps


def counted(left: Left, tally: Tally) -> None:
    """Count the steps that a loop had in the tables, and where it read and wrote."""
    tally.ran("graph", left.ran)
    for phase in left.loop.phases:
        ran, plan = left.ran_in(phase), phase.steps.plan
        for location in plan.read if ran else ():
            tally.serve(location, ran)
        for location in plan.written if ran else ():
            tally.write(location, ran)


def window_of(loop: Loop, since: int) -> Window | None:
    """Return the steps of a loop that may run in the tables; None if the loop leaves out steps.

    The last step of a loop with an end is the block's own, because the code after the loop goes on in that step.

    Args:
        loop: the loop; it waits for its first step.
        since: the next step of the request.
    """
    if not isinstance(loop.coming, _RANGE):
        return None
    ahead = list(itertools.islice(copy.copy(loop.coming), 1))
    if ahead and ahead[0] != loop.asked + 1:
        return None
    left = operator.length_hint(loop.coming, ALL)
    return Window(since, loop.asked, min(ALL, loop.asked + left))


def held(plan: Plan, window: Window) -> Window:
    """Return the steps of a window up to the first in which a plan's guards do not hold."""
    if not plan.guards:
        return window
    last = min(window.until, window.first + AHEAD)
    until = next((step for step in range(window.first, last) if not plan.holds(step)), last)
    return Window(window.since, window.first, until)


def number_of(plan: Plan, member: Member, how: object) -> int:
    """Return a number other than 0 that stands for what a loop does.

    Two ranks share it only if they run the same steps of a plan with the same constants. Waits for the device.

    Args:
        plan, member: as of `inputs_of`.
        how: what else must be the same: the steps, and the program, whose graphs the ranks must have alike.
    """
    inputs = inputs_of(plan, member)
    constants = [(number, digests(inputs[number])) for number in sorted(inputs)]
    return zlib.crc32(repr((plan.key, how, constants)).encode()) | 1 << 32
