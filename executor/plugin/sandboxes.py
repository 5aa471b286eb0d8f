"""The processes in which blocks of tenants without trust run, as a worker starts them."""

from __future__ import annotations

from typing import Any

from executor.model.tree import ModuleTree
from executor.sandbox.pool import Pool
from executor.sandbox.skeleton import Skeleton
from executor.sandbox.zygote import Setup


def start(pool: Pool, tree: ModuleTree, config: Any) -> None:
    """Tell the processes of the model, and wait until one is ready.

    Args:
        pool: the processes.
        tree: the model's modules.
        config: the engine's VllmConfig.

    Raises:
        RuntimeError: no process can be made.
    """
    settings, model = config.additional_config["interpose"], config.model_config
    widths = model.get_hidden_size(), model.get_head_size()
    pool.start(Setup(Skeleton.of(tree), widths, settings["block_memory_bytes"], settings["max_saved_bytes"]))
