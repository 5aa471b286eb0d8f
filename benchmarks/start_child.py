"""Starts executors and times their start.

`python -m benchmarks.start_child CHECKPOINT RANKS [OPTIONS]`, with the arguments of `benchmarks.stock_engine`. Both executors
start in the same process, on the same Ray, in the same placement group, with vLLM's own worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.own_ray import own_ray
from benchmarks.rounds import answer_forever
from executor.cluster.network import use_interface_of

GONE_SECONDS = 60.0
# Ray starts new processes in place of the processes that were taken from its pool.
_SETTLE_SECONDS = 3.0


def main(checkpoint: str, ranks: str, given: str = "{}") -> None:
    """Answer requests for timed starts until the input ends."""
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # vLLM's executor lets gloo find an interface by this machine's name.
    use_interface_of("127.0.0.1")
    with own_ray(int(ranks)) as head:
        answer_forever(Starts(checkpoint, int(ranks), json.loads(given), head.look_after).answer)


class Starts:
    """Runs timed starts, one at a time.

    Args:
        checkpoint: the model's folder.
        ranks: the tensor-parallel size.
        given: further options of vLLM's engine.
        look_after: called while workers run (see `own_ray`).
    """

    def __init__(self, checkpoint: str, ranks: int, given: dict[str, Any], look_after: Callable[[], None]) -> None:
        import ray
        from vllm.platforms import current_platform

        from executor.plugin.config import prepare_environment

        prepare_environment(ranks)
        self._look_after = look_after
        self._options = {"model": checkpoint, "tensor_parallel_size": ranks, **given}
        device = current_platform.ray_device_key or "CPU"
        self._group = ray.util.placement_group([{device: 1.0}] * ranks, strategy="PACK")
        ray.get(self._group.ready())

    def answer(self, executor: str) -> dict[str, float]:
        """Start an executor and end it again.

        Args:
            executor: a name of `start_executors.STARTS`.

        Returns:
            Seconds until all actors are constructed ("actors"), and until all workers have the model and wait for steps
            ("workers").
        """
        import ray
        from vllm.engine.arg_utils import AsyncEngineArgs

        from benchmarks.start_executors import STARTS

        deployed, timed = STARTS[executor]
        config = AsyncEngineArgs(**self._options, distributed_executor_backend=deployed).create_engine_config()
        config.parallel_config.placement_group = self._group
        started = timed.__new__(timed)  # the object exists even if its start is interrupted
        try:
            began = time.perf_counter()
            started.__init__(config)
            ready = time.perf_counter()
            taken = {"actors": started.constructed() - began, "workers": ready - began}
            ends = [handle.run_ref for handle in started.ray_worker_handles]
        finally:
            # vLLM would do this when the process ends. Ray is gone by then, and vLLM would wait for it.
            self._look_after()
            started.shutdown()
        _, alive = ray.wait(ends, num_returns=len(ends), timeout=GONE_SECONDS)
        if alive:
            raise RuntimeError(f"{len(alive)} workers were still there {GONE_SECONDS:g} s after their executor")
        time.sleep(_SETTLE_SECONDS)
        return taken


if __name__ == "__main__":
    main(*sys.argv[1:])
