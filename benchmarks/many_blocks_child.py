"""The engine of `benchmarks.many_blocks`: plain requests that go on, and others in turn.

`python -m benchmarks.many_blocks_child CHECKPOINT [OPTIONS]`. OPTIONS are further options of vLLM's LLM, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.many_blocks import source
from benchmarks.rounds import answer_forever
from benchmarks.tier_child import Engine
from benchmarks.traced_batch import TracedBlock, TracedTrace

NEIGHBOURS = 8
PROMPT_TOKENS = 16
TOKENS = 16  # new tokens of a request in turn: a graph is made of a plan that has run some steps


def main(checkpoint: str, given: str = "{}") -> None:
    """Load the engine, and answer requests for chunks of requests in turn."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    answer_forever(Turns(Engine("interpose", checkpoint, json.loads(given))).answer)


class Turns:
    """Plain requests without an end, and one request after another beside them.

    Args:
        engine: the engine, with traces.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layers = engine.llm.model_config.get_num_layers(engine.llm.vllm_config.parallel_config)
        self._neighbours: dict[str, float] = {}  # when each got its last token

    def answer(self, numbers: Sequence[int | str]) -> dict[str, Any]:
        """Run requests in turn; return the seconds between plain tokens, and the memory.

        Args:
            numbers: a block's number for each request, or "plain" for a request without a block.

        Raises:
            RuntimeError: a block failed.
        """
        prepared = [self._prepared(number) for number in numbers]
        self._fill()
        self._neighbours = dict.fromkeys(self._neighbours, 0.0)  # the time since the last answer does not count
        gaps: list[float] = []
        longest: list[float] = []
        for trace in prepared:
            came = self._turn(trace)
            gaps += came
            longest.append(max(came))
        return {"gaps": gaps, "longest": longest, "memory": memory()}

    def close(self) -> None:
        """End the plain requests."""
        self._engine.llm.abort_request(list(self._neighbours))
        self._neighbours.clear()

    def _prepared(self, number: int | str) -> TracedTrace | None:
        """Return a request's trace, as it is prepared outside of the workers."""
        if isinstance(number, str):
            return None
        uploads = self._engine.worker.interpose_outbox.uploads
        return TracedBlock(source(number, self._layers), {}, uploads).batches(1)[0]

    def _fill(self) -> None:
        """Start plain requests until there are as many as there shall be."""
        room = self._engine.llm.model_config.max_model_len - PROMPT_TOKENS - 1
        while len(self._neighbours) < NEIGHBOURS:
            name = self._engine.name()
            # They end one after another.
            tokens = room - room // (2 * NEIGHBOURS) * len(self._neighbours)
            self._engine.add(name, PROMPT_TOKENS, tokens, increments=True)
            self._neighbours[name] = 0.0

    def _turn(self, trace: TracedTrace | None) -> list[float]:
        """Run one request to its end; return the seconds between plain tokens meanwhile."""
        name = self._engine.name()
        self._engine.add(name, PROMPT_TOKENS, TOKENS, trace.extra_args(0) if trace is not None else None)
        gaps: list[float] = []
        ended: Any = None
        while ended is None:
            outputs = self._engine.llm.step()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id == name:
                    ended = output if output.finished else None
                elif output.request_id in self._neighbours:
                    if self._neighbours[output.request_id]:
                        gaps.append(now - self._neighbours[output.request_id])
                    self._neighbours[output.request_id] = now
                    if output.finished:
                        del self._neighbours[output.request_id]
            self._fill()
        if trace is not None:
            trace.finish(self._engine.worker, 0, ended)
            list(trace.values(self._engine.worker.interpose_outbox.blobs))
        return gaps


def memory() -> dict[str, int]:
    """Return the bytes that the process has on the host, and on its device if there is one."""
    import torch

    found = {"host": psutil.Process().memory_info().rss}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {"device": total - free, "reserved by torch": torch.cuda.memory_reserved()}
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
