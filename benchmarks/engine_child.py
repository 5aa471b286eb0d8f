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
    from vllm.sampling_params import RequestOutputKind

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
    engine: Any = llm.llm_engine
    config = engine.model_config
    vector = torch.full((config.get_hidden_size(),), 0.01, dtype=config.dtype)

    def generate(
        batch: int, prompt_tokens: int, tokens: int, work: str = "", traced: int = 1, plain_only: bool = False
    ) -> float:
        """Return the seconds that a batch takes, its first `traced` requests with the block `work` if that is given.

        With `plain_only` the time ends with the last of the others, which do not wait for those with a block.
        """
        prompts = [[(7 * i + 3 * j) % 400 + 5 for j in range(prompt_tokens)] for i in range(batch)]
        given: dict[str, Any] = {"max_tokens": tokens, "detokenize": not config.skip_tokenizer_init}
        given |= {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        blocks = [TracedRequest(work, vector=vector) for _ in range(traced if work else 0)]
        finished: dict[str, Any] = {}
        ends = 0.0
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            params = SamplingParams(**given)
            if i < len(blocks):
                params.extra_args = blocks[i].extra_args()
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
            if plain_only and not ends and all(str(i) in finished for i in range(len(blocks), batch)):
                ends = time.perf_counter()
        for i, block in enumerate(blocks):
            block.finish(engine.model_executor.driver_worker.worker, finished[str(i)])
        return (ends or time.perf_counter()) - began

    answer_forever(generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
