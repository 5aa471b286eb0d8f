"""vLLM's own metrics on their way to Ray's agent, at a cost that the batch does not raise."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger


class StatLogger(RayPrometheusStatLogger):
    """vLLM's logger of metrics for Ray, which observes one latency between tokens in each step.

    vLLM's observes one for each request, with a call of Ray for each. The requests of a step have nearly the same latency.
    """

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Take the figures of one step, with the longest of its latencies between tokens."""
        if iteration_stats is not None and len(iteration_stats.inter_token_latencies_iter) > 1:
            iteration_stats.inter_token_latencies_iter = [max(iteration_stats.inter_token_latencies_iter)]
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
