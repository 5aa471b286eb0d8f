"""Ranks of one model as processes that each run the whole engine, alike; told by RANK, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vllm.distributed import get_pp_group, get_world_group
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from executor.parallel.merge_tree import gather


class LaunchedRank(ExecutorWithExternalLauncher):
    """vLLM's executor for that, meeting at an address of its own: its shared memory is named after it.

    vLLM's own form of it for pipeline stages hands logits round and has the first stage sample too. Here each stage does as
    it does under the executors that are deployed; what the last one sampled is told to the schedulers of the others.
    """

    supports_pp = True

    def _init_executor(self) -> None:
        super()._init_executor()
        # All have the memory that they share, also those of other groups, so its name can go: a rank that is ended leaves
        # nothing behind.
        get_world_group().barrier()
        for file in Path("/dev/shm").glob(f"{os.environ['MASTER_PORT']}-*-cpushm_*"):
            file.unlink(missing_ok=True)

    def _distributed_args(self) -> tuple[str, int, int]:
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return address, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

    def get_kv_cache_specs(self) -> list[Any]:
        """Return those of all stages: each of the schedulers plans for the whole model."""
        [mine] = super().get_kv_cache_specs()
        return gather(mine)

    def determine_available_memory(self) -> list[int]:
        [least] = super().determine_available_memory()
        return [least] * get_pp_group().world_size

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        super().initialize_from_config([kv_cache_configs[get_pp_group().rank_in_group]])

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return what the last stage sampled, on every stage."""
        stages = get_pp_group()
        output = super().sample_tokens(grammar_output)
        output = stages.broadcast_object(output, src=stages.world_size - 1)
        if not non_block:
            return output
        done: Future[Any] = Future()
        done.set_result(output)
        return done
