"""The worker on GPUs, with the model runner that vLLM chooses."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from executor.graphs.limits import GraphLimits
from executor.graphs.loops import TableLoops
from executor.parallel.agreement import AllRanks, Alone
from executor.plugin.captures import Captures
from executor.plugin.runner_v1 import GPURunnerV1
from executor.plugin.worker import InterposeWorker

logger = init_logger(__name__)


class InterposeGPUWorker(InterposeWorker, Worker):
    """A worker on GPUs, with the runner that vLLM chooses."""

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            from executor.plugin.runner_v2 import GPURunnerV2  # The module imports kernels that only GPUs have.

            return GPURunnerV2(self.vllm_config, self.device)
        return GPURunnerV1(self.vllm_config, self.device)

    @property
    def _has_tables(self) -> bool:
        return super()._has_tables and bool(self.use_v2_model_runner)

    def _prepare_graphs(self, loops: TableLoops) -> None:
        from executor.plugin.graphs import TableGraphs, why_not

        self._tell("compiling the kernel of taps")
        loops.compile_kernels()
        why = why_not(self.model_runner)
        if why:
            logger.warning("Blocks run in no CUDA graphs: %s.", why)
        else:
            captures = Captures.of(AllRanks() if self.parallel_config.world_size > 1 else Alone())
            self.model_runner.graphs = TableGraphs(self.model_runner, loops, GraphLimits(), captures)
