"""One in-process engine of a benchmark: `python -m benchmarks.engine_child stock|interpose CHECKPOINT`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.blocks import TracedRequest
from benchmarks.rounds import answer_forever


class BenchLimits:
    """The bounds that benchmarks run with."""

    step_seconds = 60.0
    block_memory_bytes = 4 << 30
    inline_bytes = 16 << 10
    max_saved_bytes = 4 << 30


def main(kind: str, checkpoint: str) -> None:
    """Load the engine and answer requests for timed generations."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    import torch
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "enforce_eager": True,
    }
    if kind == "interpose":
        from executor.options import trace_options

        options |= trace_options(BenchLimits, "local")
    llm = LLM(model=checkpoint, **options)
    hidden_size = llm.llm_engine.model_config.get_hidden_size()

    def generate(batch: int, prompt_tokens: int, tokens: int, work: str = "") -> float:
        """Return the seconds that a batch takes, its first request with the block `work` if that is given."""
        prompts: list[Any] = [
            {"prompt_token_ids": [(7 * i + 3 * j) % 400 + 5 for j in range(prompt_tokens)]} for i in range(batch)
        ]
        params = [SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True) for _ in prompts]
        traced = TracedRequest(work, vector=torch.full((hidden_size,), 0.01)) if work else None
        if traced is not None:
            params[0].extra_args = traced.extra_args()
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if traced is not None:
            traced.finish(llm.llm_engine.model_executor.driver_worker.worker, outputs[0])
        return time.perf_counter() - began

    answer_forever(generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
