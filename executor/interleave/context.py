"""The parts of a worker that run blocks, put together when its model has loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from executor.block.budget import Budget
from executor.block.tally import Precision
from executor.graphs.loops import TableLoops
from executor.interleave.explaining import Facts
from executor.model.apply import Applier
from executor.model.constants import ConstantPool
from executor.model.kv_guard import CacheGuard
from executor.model.tree import ModuleTree
from executor.parallel.agreement import Ranks
from executor.parallel.pipeline import Stages
from executor.plan.forms import Form
from executor.sandbox.pool import Pool
from executor.saves.collect import Limits
from executor.saves.outbox import Outbox


@dataclass(frozen=True)
class Host:
    """One worker, as far as blocks have to do with it.

    Size: it names the parts of a worker, so that constructors take one host and not each part.

    Attributes:
        tree: the model's modules.
        applier: applies modules to values of blocks.
        budget: time and memory bounds.
        outbox: where saves and prints go.
        limits: bounds on what is saved.
        ranks: the ranks that run the same blocks.
        stages: the pipeline's stages.
        reports: whether this rank sends saves.
        precision: how the engine computes.
        vocabulary: how many tokens the model knows.
        cache: looks after what blocks leave in the engine's cache.
        constants: the large tensors that sessions bring.
        plans: whether steps of blocks run as plans where they can (`executor.plan`).
        loops: the loops that run in the tables; None: none does.
        forms: of the locations' values for one row, by path and kind.
        sandboxes: the processes in which blocks of tenants without trust run, started on the rank that reports; None: the blocks
            run in the worker.
        sandbox_plans: whether steps of their blocks run as plans in the worker.
        shapes: the forms of the locations' values for one row, by path and kind, where prompts may come in chunks.
        step_tokens: the most tokens of a step.
        facts: returns what explanations need to know; it runs the model when it is called first, between two steps.
    """

    tree: ModuleTree
    applier: Applier
    budget: Budget
    outbox: Outbox
    limits: Limits
    ranks: Ranks
    stages: Stages
    reports: bool
    precision: Precision
    vocabulary: int
    cache: CacheGuard
    constants: ConstantPool = field(default_factory=ConstantPool)
    plans: bool = False
    loops: TableLoops | None = None
    forms: Mapping[tuple[str, str], Form] = field(default_factory=dict)
    shapes: Mapping[tuple[str, str], Form] = field(default_factory=dict)
    step_tokens: int = 0
    facts: Callable[[], Facts] | None = None
    sandboxes: Pool | None = None
    sandbox_plans: bool = False
