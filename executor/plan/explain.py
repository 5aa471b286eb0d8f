"""Says whether a block's loop is a plan, and if not, which line keeps it from being one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from executor.core.programs import Unit
from executor.plan.compile import Context, compile_region, survey
from executor.plan.eligible import Region, regions
from executor.plan.ir import Plan
from executor.plan.refuse import Refused


@dataclass(frozen=True)
class Explanation:
    """How one part of a block runs.

    Attributes:
        line: the notebook's line where the part begins.
        tier: "plan", or "general" for code that runs as it is.
        batched: of a plan, whether its operations run once for all requests on a CPU.
        reads, writes: of a plan, its locations, as `path.kind`.
        why: the reason for the tier: of a plan that runs for each request, the operation that keeps it from a batch.
        at: the line that keeps the part from a better tier, 0 if there is none.
        instead: what to write instead.
    """

    line: int
    tier: str
    batched: bool = False
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    why: str = ""
    at: int = 0
    instead: str = ""

    def __str__(self) -> str:
        if self.tier == "plan":
            many = "once for all requests" if self.batched else f"for each request, because of {self.why}"
            return f"line {self.line}: a plan, which runs {many}"
        reason = f"line {self.at}: {self.why}" if self.at else self.why
        return f"line {self.line}: runs as it is ({reason}" + (f"; {self.instead}" if self.instead else "") + ")"


def explain(unit: Unit) -> list[Explanation]:
    """Return how the parts of a block run, as far as its text says.

    A part that the text lets be a plan may still be refused where it runs, by what it reads.
    """
    try:
        return [Explanation(region.line, "plan") for region in regions(unit)]
    except Refused as refused:
        return [general(unit.first_line, refused)]


def explain_region(
    region: Region, namespace: Mapping[str, Any], live: frozenset[str], step: int, context: Callable[[], Context]
) -> Explanation:
    """Return how a part of a block runs, with what the block reads.

    Args:
        region, namespace, live, step: as of `compile_region`.
        context: gives what a compilation needs.
    """
    try:
        survey(region, namespace, context().source_of)
        return of_plan(region, compile_region(region, namespace, live, step, context()))
    except Refused as refused:
        return general(region.line, refused)


def of_plan(region: Region, plan: Plan) -> Explanation:
    """Return the explanation of a part that is a plan."""
    reads = tuple(f"{read.path}.{read.kind}" for read in plan.reads)
    return Explanation(region.line, "plan", not plan.unstable, reads, plan.written, plan.unstable)


def general(line: int, refused: Refused) -> Explanation:
    """Return the explanation of a part that is no plan."""
    return Explanation(line, "general", why=refused.what, at=refused.line, instead=refused.instead)
