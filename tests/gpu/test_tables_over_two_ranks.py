"""Loops in captured graphs over two tensor-parallel ranks on two GPUs give what their blocks give there, bit for bit.

Two engines run each case, one after the other. They have CUDA graphs and are not compiled: all steps have the same kernels.
What is done is said at once, so that a run that hangs shows where: `pytest -s -o faulthandler_timeout=200`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from interpose.cli.demo_model import write_demo_model
from tests.engine.block.test_accounting import account
from tests.engine.interleave.test_loops_in_tables import PROMPTS, STEPS, block, check_same
from tests.engine.parallel.test_tables_over_ranks import CASES, steps_in_tables
from tests.engine.spread import SpreadEngine
from tests.gpu.conftest import SIZES

NOT_COMPILED = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES},
}


def kinds(worker: Any) -> dict[str, int]:
    """Return how the steps of a worker's loops ran, and what became of its captures."""
    counts = worker.model_runner.graphs.dispatcher.counts
    return {
        **counts.steps,
        "captured": counts.captured,
        "failed": counts.failed,
        "mismatched": counts.mismatched,
    }


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """What an engine gives without tables and with them, and what its ranks tell of their graphs."""
    checkpoint: Path = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    found: dict[bool, dict[str, Any]] = {}
    began = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:.0f} s: {what}", file=sys.__stderr__, flush=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        for graphs in (False, True):
            engine = SpreadEngine(checkpoint, 2, 1, step_seconds=60.0, max_num_seqs=8, graphs=graphs, **NOT_COMPILED)
            tell(f"an engine runs, graphs={graphs}")
            found[graphs] = {}
            for name, (text, _) in CASES.items():
                traces = [[block(text, i % 3)] for i in range(5)]
                found[graphs][name] = engine.run_traces(traces, plain=(PROMPTS[2],), plain_tokens=STEPS)
                tell(name)
            texts = [text for text, _ in CASES.values() if "torch.stack" not in text]
            blocks = [block(text, i % 3, max_tokens=2 + (5 * i) % 13) for i, text in enumerate(texts)]
            found[graphs]["all"] = engine.run_traces(
                [[one] for one in blocks], plain=(PROMPTS[2],) * 3, plain_tokens=30
            )
            tell("all at once")
            if graphs:
                found[graphs]["kinds"] = engine.llm.collective_rpc(kinds)
            assert engine.worker.idle, "a trace left something behind"
            engine.close()
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_loop_gives_what_its_block_gives(given: dict[bool, dict[str, Any]], name: str) -> None:
    blocks, loops = (given[graphs][name] for graphs in (False, True))
    for one, other in zip(blocks[:5], loops[:5], strict=True):
        check_same(one, other)
    steps = steps_in_tables(name)
    for ran in loops[:5]:
        told = account(ran)
        assert told.tiers.get("graph", 0) == steps, told.reasons


def test_requests_that_come_and_go_get_what_their_blocks_give(given: dict[bool, dict[str, Any]]) -> None:
    for i, (one, other) in enumerate(zip(given[False]["all"], given[True]["all"], strict=True)):
        assert (i, one.token_ids) == (i, other.token_ids)
        if one.state is not None:
            check_same(one, other)


def test_the_ranks_decided_alike_for_each_step(given: dict[bool, dict[str, Any]]) -> None:
    first, second = given[True]["kinds"]
    print(first)
    assert first == second
    assert first["captured"] > 0 and first["in a captured graph"] > first["captured"]
    assert first["failed"] == first["mismatched"] == 0
