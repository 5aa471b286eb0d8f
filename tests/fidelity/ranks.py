"""Ranks of one model as processes that each run the whole engine, alike; told by RANK, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import os

from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher


class LaunchedRank(ExecutorWithExternalLauncher):
    """vLLM's executor for that, meeting at an address of its own: its shared memory is named after it."""

    def _distributed_args(self) -> tuple[str, int, int]:
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return address, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
