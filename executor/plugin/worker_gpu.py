"""The worker on GPUs, with the model runner that vLLM chooses."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from executor.plugin.runner_v1 import GPURunnerV1
from executor.plugin.worker import InterposeWorker


class InterposeGPUWorker(InterposeWorker, Worker):
    """A worker on GPUs, with the runner that vLLM chooses."""

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            from executor.plugin.runner_v2 import GPURunnerV2  # The module imports kernels that only GPUs have.

            return GPURunnerV2(self.vllm_config, self.device)
        return GPURunnerV1(self.vllm_config, self.device)
