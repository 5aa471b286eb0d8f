"""An engine with traces on the service's executor, without a service around it.

`python -m benchmarks.tier_ranks_child CHECKPOINT LAYOUT [OPTIONS]`. LAYOUT is the tensor-parallel size, or TENSORxSTAGES; OPTIONS
are further options of vLLM's engine, as JSON. The engine has a Ray head of its own. Saved values come inside the events of a
trace, since there is no session that would take them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.engine_child import switched_on
from benchmarks.layouts import Layout
from benchmarks.models import prompts
from benchmarks.own_ray import own_ray
from benchmarks.rounds import answer_forever
from benchmarks.tier_rows import ROWS, constants
from benchmarks.traced_batch import TracedBlock, values_of
from interpose.wire.events import apart

LIMITS = {"inline_bytes": 1 << 31, "step_seconds": 60.0}


def main(checkpoint: str, layout: str, given: str = "{}") -> None:
    """Start the engine and answer requests until the input ends."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as in `benchmarks.stock_engine`
    spread = Layout.of(layout)
    with own_ray(spread.ranks):
        from executor.engine.engine import TraceEngine
        from serve_app.settings import ModelSettings

        model = ModelSettings(
            model=checkpoint,
            tensor_parallel_size=spread.tensor,
            pipeline_parallel_size=spread.pipeline,
            engine=json.loads(given),
            limits=LIMITS,
            **switched_on(ModelSettings),
        )
        loop = asyncio.new_event_loop()
        engine = loop.run_until_complete(TraceEngine.start(model))
        try:
            answer_forever(Batches(engine, loop).answer)
        finally:
            loop.run_until_complete(engine.shutdown())


class Batches:
    """Runs timed batches on an engine, one at a time.

    Args:
        engine: the engine.
        loop: the event loop that the engine runs on.
    """

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        config = engine.llm.vllm_config.model_config
        self._layers = config.get_total_num_hidden_layers()
        self._constants = constants(config.get_hidden_size(), config.dtype)
        self._blocks: dict[str, TracedBlock] = {}
        self._prompts: dict[int, Iterator[list[int]]] = {}

    def answer(self, prompt_tokens: int, tokens: int, row: str = "plain", batch: int = 1) -> float | str:
        """Return the seconds of a batch, or why it does not count.

        Args:
            prompt_tokens, tokens: numbers of tokens of each request.
            row: one of `ROWS`.
            batch: requests of the batch.
        """
        some = self._prompts.setdefault(prompt_tokens, prompts(prompt_tokens))
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        if row not in self._blocks:
            captured = {name: self._constants[name] for name in ROWS[row].captured}
            self._blocks[row] = TracedBlock(ROWS[row].source or "pass\n", captured, {})
        requests = [self._blocks[row].request(next(some), sampling) for _ in range(batch)]

        async def all_of_them() -> list[list[bytes]]:
            return await asyncio.gather(*(self._run(request) for request in requests))

        began = time.perf_counter()
        try:
            events = self._loop.run_until_complete(all_of_them())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        took = time.perf_counter() - began
        expected = ROWS[row].expected(self._layers, tokens)
        came = [sum(len(kept) for kept in values_of(some, {})) for some in events]
        if wrong := set(came) - {expected}:
            return f"{sorted(wrong)} values came instead of {expected}"
        return took

    async def _run(self, request: Any) -> list[bytes]:
        return [event async for some in self._engine.run(request) for event in apart(some)]


if __name__ == "__main__":
    main(*sys.argv[1:])
