"""The worker and the runner on CPUs.

They have a module of their own, because the import of vLLM's CPU worker replaces torch's streams and events by placeholders for
the whole process.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

# The worker's module comes first: it patches torch.
from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # isort: skip

from executor.plugin.cpu_mends import CPUMends
from executor.plugin.runner_v1 import InterleavingRunnerV1
from executor.plugin.worker import InterposeWorker


class CPURunnerV1(InterleavingRunnerV1, CPUModelRunner):
    """The V1 runner on CPUs."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Keep the random generators of cut prompts out of the sampling that is thrown away.

        vLLM samples after every chunk of a prompt, drops the samples before the last chunk, and sets a request's own generator
        back by an offset. Generators on CPUs have no offset, so a seeded request would end the engine.
        """
        if not (self.interleaves or self.input_batch.generators):  # The mixin would only go on in vLLM's method.
            return CPUModelRunner.sample_tokens(self, grammar_output)
        generators = self.input_batch.generators
        if not generators:
            return super().sample_tokens(grammar_output)
        dropped = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        aside = {index: generators.pop(index) for index in dropped if index in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(aside)


class InterposeCPUWorker(InterposeWorker, CPUMends, CPUWorker):
    """A worker on CPUs.

    `CPUWorker` has no runner factory, so its runner is replaced before the model loads.
    """

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = CPURunnerV1(self.vllm_config, torch.device("cpu"))
