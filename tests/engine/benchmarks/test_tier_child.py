"""The engines of benchmarks run every row and many blocks, and notice values that do not come."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.many_blocks_child import NEIGHBOURS, TOKENS, Turns
from benchmarks.tier_child import Engine
from benchmarks.tier_rows import ROWS
from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.kept import KEPT

REQUEST = {"batch": 3, "prompt_tokens": 16, "tokens": 4}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from vllm.distributed import cleanup_dist_env_and_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", Shape(layers=6))
        memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 256 << 20}
        options = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "skip_tokenizer_init": True}
        KEPT.make_way()
        engine = Engine("interpose", str(checkpoint), {**options, **memory})
        yield engine
        assert engine.worker.model_runner.interleaver.idle
        assert not engine.worker.interpose_outbox.blobs
        engine.llm.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize("row, joined", list(itertools.product(ROWS, [False, True])))
def test_every_row_runs(engine: Engine, row: str, joined: bool) -> None:
    tokens = ROWS[row].tokens or REQUEST["tokens"]
    took = engine.answer(row=row, **{**REQUEST, "tokens": tokens}, joined=joined)
    assert isinstance(took, float), took
    assert took > 0


def test_a_report_has_the_parts_of_the_batch(engine: Engine) -> None:
    report = engine.answer(row="capture one", **REQUEST, report="profile")
    assert report["steps"] >= REQUEST["tokens"]
    assert report["admission"] + report["first step"] + report["finish"] < report["all"]
    by_folder = report["profile"].split("own time by folder:")[1]
    assert " ms  executor/" in by_folder  # which of its folders are among the longest is a matter of microseconds


def test_missing_values_do_not_count(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "capture one", replace(ROWS["capture one"], kept="all"))
    assert "4 values came instead of 24" in engine.answer(row="capture one", **REQUEST)
    assert isinstance(engine.answer(row="steer", **REQUEST), float)


def test_a_failed_block_leaves_the_engine_as_it_was(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "steer", replace(ROWS["steer"], source="raise ValueError('no such thing')\n"))
    assert "no such thing" in engine.answer(row="steer", **REQUEST)
    assert isinstance(engine.answer(row="capture all", **REQUEST), float)


def test_requests_in_turn_run_beside_plain_requests_that_go_on(engine: Engine) -> None:
    turns = Turns(engine)
    answer = turns.answer(["plain", 0, 1, 2, 3, 4, 5])
    assert len(answer["longest"]) == 7
    assert len(answer["gaps"]) >= NEIGHBOURS * 6 * TOKENS
    assert answer["memory"]["host"] > 0
    again = turns.answer([0])  # the time between the answers is no time between tokens
    assert max(again["gaps"]) == again["longest"][0]
    assert engine.llm.get_num_unfinished_requests() == NEIGHBOURS
    turns.close()
    assert not engine.llm.has_unfinished_requests()
