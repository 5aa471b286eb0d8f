"""What a worker gives to those who run its blocks, put together once, when its model has loaded."""

from __future__ import annotations

from dataclasses import dataclass

from executor.accounting import Precision
from executor.apply import Applier
from executor.budget import Budget
from executor.cache_guard import CacheGuard
from executor.collect import Limits
from executor.outbox import Outbox
from executor.ranks import Ranks
from executor.stages import Stages
from executor.tree import ModuleTree


@dataclass(frozen=True)
class Host:
    """One worker, as far as blocks have to do with it.

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
