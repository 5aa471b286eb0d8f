"""The worker of an engine that serves plain requests only, on GPUs."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from executor.plugin.worker_plain import PlainWorker


class PlainGPUWorker(PlainWorker, Worker):
    """vLLM's worker, which can describe its model."""
