"""Stock vLLM on the system's Ray executor.

`python -m benchmarks.stock_engine CHECKPOINT LAYOUT [OPTIONS]`. LAYOUT is the tensor-parallel size, or TENSORxSTAGES; OPTIONS are
further options of vLLM's engine, as JSON. vLLM's own Ray executor refuses CPUs and starts its workers in another way. So the
executor here is that of a service, `executor.cluster.executor`; worker, model runner and scheduler are vLLM's. The engine has a
Ray head of its own, beside a service's, and shares GPUs with the service.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.layouts import Layout
from benchmarks.models import prompts
from benchmarks.own_ray import own_ray
from benchmarks.rounds import answer_forever


def main(checkpoint: str, layout: str, given: str = "{}") -> None:
    """Start the engine and answer requests until the input ends."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # without it `collective_rpc` returns no tensors
    # A forked engine process would believe that it is connected to Ray, as this process is.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    spread = Layout.of(layout)
    with own_ray(spread.ranks):
        llm = _engine(checkpoint, spread, json.loads(given))
        try:
            answer_forever(Requests(llm).answer)
        finally:
            llm.shutdown()


def _engine(checkpoint: str, layout: Layout, given: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from executor.engine.options import engine_options
    from executor.plugin.config import prepare_environment, trace_options
    from serve_app.settings import ModelSettings

    prepare_environment(layout.ranks)
    model = ModelSettings(
        model=checkpoint, tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline, engine=given
    )
    options = engine_options(model)
    for name in trace_options(model.limits):  # options that make it a service's engine
        del options[name]
    options["worker_extension_cls"] = "benchmarks.stock_tensor.StockTensor"
    return AsyncLLM.from_vllm_config(AsyncEngineArgs(**options).create_engine_config())


class Requests:
    """Runs timed requests, one at a time.

    Args:
        llm: vLLM's AsyncLLM.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._loop = asyncio.new_event_loop()
        self._prompts: dict[int, Iterator[list[int]]] = {}
        self._ids = itertools.count()

    def answer(self, prompt_tokens: int, tokens: int, pause: float = 0.0, numbers: int = 0, batch: int = 1) -> float:
        """Return the seconds of a batch, and of bringing a tensor from rank 0 to this process.

        Args:
            prompt_tokens, tokens: numbers of tokens that each request reads and generates.
            pause: seconds to wait before the batch.
            numbers: elements of the tensor, in the model's type; 0 for no tensor.
            batch: requests at a time.
        """
        some = self._prompts.setdefault(prompt_tokens, prompts(prompt_tokens))
        batch_prompts = [next(some) for _ in range(batch)]

        async def all_of_them() -> None:
            await asyncio.gather(*(self._run(prompt, tokens, numbers) for prompt in batch_prompts))

        time.sleep(pause)
        began = time.perf_counter()
        self._loop.run_until_complete(all_of_them())
        return time.perf_counter() - began

    async def _run(self, prompt: list[int], tokens: int, numbers: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate({"prompt_token_ids": prompt}, params, str(next(self._ids)))
        *_, last = [len(output.outputs[0].token_ids) async for output in outputs]
        if last != tokens:
            raise RuntimeError(f"{last} tokens came instead of {tokens}")
        if numbers:
            tensor, *_ = await self._llm.collective_rpc("stock_tensor", args=(numbers,))
            if tensor.numel() != numbers or float(tensor[-1]) != 1.0:
                raise RuntimeError(f"{tuple(tensor.shape)} came instead of {numbers} numbers")


if __name__ == "__main__":
    main(*sys.argv[1:])
