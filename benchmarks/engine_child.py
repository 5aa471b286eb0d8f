"""One in-process engine of a benchmark: `python -m benchmarks.engine_child stock|interpose CHECKPOINT [OPTIONS]`.

OPTIONS are further options of vLLM's LLM, as JSON.
"""

from __future__ import annotations

import json
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


def main(kind: str, checkpoint: str, given: str = "{}") -> None:
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
    } | json.loads(given)
    if options["async_scheduling"] is None:
        del options["async_scheduling"]
    if kind == "interpose":
        from executor.options import trace_options

        options |= trace_options(BenchLimits, "local")
    llm = LLM(model=checkpoint, **options)
    config = llm.llm_engine.model_config
    vector = torch.full((config.get_hidden_size(),), 0.01, dtype=config.dtype)

    def generate(batch: int, prompt_tokens: int, tokens: int, work: str = "", traced: int = 1) -> float:
        """Return the seconds that a batch takes, its first `traced` requests with the block `work` if that is given."""
        prompts: list[Any] = [
            {"prompt_token_ids": [(7 * i + 3 * j) % 400 + 5 for j in range(prompt_tokens)]} for i in range(batch)
        ]
        given: dict[str, Any] = {"max_tokens": tokens, "detokenize": not config.skip_tokenizer_init}
        params = [SamplingParams(**given, temperature=0.0, ignore_eos=True) for _ in prompts]
        blocks = [TracedRequest(work, vector=vector) for _ in range(traced if work else 0)]
        for one, block in zip(params, blocks, strict=False):
            one.extra_args = block.extra_args()
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for block, output in zip(blocks, outputs, strict=False):
            block.finish(llm.llm_engine.model_executor.driver_worker.worker, output)
        return time.perf_counter() - began

    answer_forever(generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
