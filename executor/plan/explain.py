"""Says whether a part of a block is a plan, and if not, which line keeps it from being one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor.plan.compile import Context, compile_region, survey
from executor.plan.eligible import Region
from executor.plan.environment import Environment
from executor.plan.ir import Plan
from executor.plan.refuse import Refused


@dataclass(frozen=True)
class Explanation:
    """How one part of a block can run.

    Attributes:
        line: the notebook's line where the part begins.
        tier: "plan", or "block" for code that runs as it is.
        reads, writes: of a plan, its locations, as `path.kind`.
        why: why the part is no plan.
        at: the line that keeps it from being a plan, 0 if there is none.
        instead: what to write instead, "" if nothing helps.
        later: whether it may be a plan in a later step.
        plan, environment: of a plan.
    """

    line: int
    tier: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    why: str = ""
    at: int = 0
    instead: str = ""
    later: bool = False
    plan: Plan | None = None
    environment: Environment | None = None


def explain_region(
    region: Region, namespace: Mapping[str, Any], live: frozenset[str], step: int, context: Context
) -> Explanation:
    """Return how a part of a block can run, with what the block reads.

    Args:
        region, namespace, live, step, context: as of `compile_region`.
    """
    try:
        environment = survey(region, namespace, context.source_of)
        plan = compile_region(region, namespace, live, step, context)
    except Refused as refused:
        return as_it_is(region.line, refused)
    except Exception as error:  # of torch's, where it traces
        return as_it_is(region.line, Refused(0, f"no plan could be made ({error})", ""))
    reads = tuple(dict.fromkeys(f"{read.path}.{read.kind}" for read in plan.reads))
    return Explanation(region.line, "plan", reads, plan.written, plan=plan, environment=environment)


def as_it_is(line: int, refused: Refused) -> Explanation:
    """Return the explanation of a part that is no plan."""
    return Explanation(line, "block", why=refused.what, at=refused.line, instead=refused.instead, later=refused.later)
