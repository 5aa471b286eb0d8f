"""Loops and blocks of the prompt of random kinds and lengths, while plain requests come, end and are given up in any step.

`python -m tests.engine.interleave.test_random_arrivals SECONDS [SEED]` tries as many as fit into the time.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import Block, LocalEngine, Ran
from tests.engine.in_two_ways import in_two_ways
from tests.engine.interleave.test_deferred import ended
from tests.engine.interleave.test_loops_in_tables import LOOPS, block, check_same, in_tables
from tests.engine.interleave.test_prompts_in_tables import BLOCKS

# Room for all; chunked prompts; a cache so small that requests are preempted; steps that are scheduled ahead.
OPTIONS: dict[str, dict[str, Any]] = {
    "room for all": {"max_num_seqs": 8},
    "chunked prompts": {"max_num_seqs": 4, "max_num_batched_tokens": 24, "enable_chunked_prefill": True},
    "a small cache": {"max_num_seqs": 6, "num_gpu_blocks_override": 6, "block_size": 32, "max_model_len": 96},
    "scheduled ahead": {"max_num_seqs": 8, "async_scheduling": True},
}
# Their blocks need not run.
OFTEN = ("reads every layer", "adds a vector", "keeps a difference", "an autoencoder", "computes the last row")
LEAST = 3  # rows that blocks of the prompt name by their numbers
ROUNDS = 6
PLAIN = ([9, 8, 7], 12)  # a request that is there from the start


@contextmanager
def arriving(engine: LocalEngine, seed: int) -> Iterator[None]:
    """Return a context in which plain requests come before some of an engine's steps, and some are given up."""
    from vllm import SamplingParams

    core, rng, waiting = engine.llm.llm_engine, random.Random(seed), []
    step = core.step

    def stepped() -> Any:
        if rng.random() < 0.2:
            engine.count += 1
            name = f"beside-{engine.count}"
            prompt = [rng.randrange(5, 490) for _ in range(rng.randrange(1, 18))]
            sampling = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 14), ignore_eos=True)
            core.add_request(name, {"prompt_token_ids": prompt, "cache_salt": name}, sampling)
            waiting.append(name)
        if waiting and rng.random() < 0.08:
            core.abort_request([waiting.pop(rng.randrange(len(waiting)))])
        return step()

    core.step = stepped
    try:
        yield
    finally:
        del core.step


def blocks_of(seed: int) -> list[Block]:
    """Return some blocks with prompts and lengths of their own."""
    rng = random.Random(seed)
    loops = [text for text, _ in LOOPS.values() if "torch.stack" not in text]  # fails where a generation is short
    others = [text for text, taken in BLOCKS.values() if taken and "tracer.result\n" not in text]
    found = []
    for _ in range(rng.randrange(1, 14)):
        if rng.random() < 0.5:  # a text and a length that come again
            text, length = LOOPS[rng.choice(OFTEN)][0], 6
        elif rng.random() < 0.7:
            text, length = rng.choice(loops), rng.randrange(1, 20)
        else:
            text, length = rng.choice(others), rng.randrange(LEAST, 20)
        one = block(text, rng.randrange(3), max_tokens=rng.randrange(1, 16))
        found.append(replace(one, prompt=[rng.randrange(5, 490) for _ in range(length)]))
    return found


def check_round(engines: tuple[LocalEngine, LocalEngine], seed: int) -> None:
    """Run the same requests in two engines, and compare what they give."""
    rans: list[list[Ran]] = []
    for engine in engines:
        with arriving(engine, seed):
            blocks = [[one] for one in blocks_of(seed)]
            rans.append(engine.run_traces(blocks, plain=(PLAIN[0],), plain_tokens=PLAIN[1]))
    for i, (one, other) in enumerate(zip(*rans, strict=True)):
        assert (seed, i, one.token_ids) == (seed, i, other.token_ids)
        if one.state is not None:
            check_same(one, other)
    assert all(engine.interleaver.idle for engine in engines), f"seed {seed}: a trace left something behind"


def make_engines(checkpoint: Path, options: dict[str, Any]) -> AbstractContextManager[tuple[LocalEngine, LocalEngine]]:
    """Return a context with an engine that runs blocks as they are, and one with plans and tables."""
    return in_two_ways(checkpoint, {"graphs": False}, {"graphs": True}, **options)


@pytest.fixture(scope="module", params=OPTIONS)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    """Two engines of one model."""
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    with make_engines(checkpoint, OPTIONS[request.param]) as made:
        yield made


def test_values_do_not_depend_on_who_comes_and_goes(engines: tuple[LocalEngine, LocalEngine]) -> None:
    before = in_tables(engines[1])
    for seed in range(ROUNDS):
        check_round(engines, seed)
    assert in_tables(engines[1]) - before > 20 * ROUNDS
    assert ended(engines[1]) > 0, "no request was deferred"


def main(seconds: float, seed: int = 1000) -> None:
    """Try rounds under all options for some seconds."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_demo_model(Path(folder) / "llama", "llama")
        for name, options in OPTIONS.items():
            with make_engines(checkpoint, options) as engines:
                ends, first = time.monotonic() + seconds / len(OPTIONS), seed
                while time.monotonic() < ends:
                    check_round(engines, seed)
                    seed += 1
                steps, deferred = in_tables(engines[1]), ended(engines[1])
                print(f"{name}: {seed - first} rounds, {steps} steps in the tables, {deferred} deferred", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
