"""The worker of an engine that serves plain requests only, on CPUs."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from executor.plugin.cpu_mends import CPUMends
from executor.plugin.worker_plain import PlainWorker


class PlainCPUWorker(PlainWorker, CPUMends, CPUWorker):
    """vLLM's worker, which can describe its model."""
