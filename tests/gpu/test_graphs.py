"""Steps without a block replay stock vLLM's graphs and call nothing of ours; steps with one run eager, and are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.custom_op import CustomOp

from tests.engine.conftest import Bench
from tests.engine.fidelity.test_fidelity import (  # noqa: F401, they run here with graphs, under both runners
    PROMPTS,
    test_a_value_from_another_invoke_patches_this_one,
    test_an_edit_does_what_the_same_edit_does_in_transformers,
    test_eight_at_once_each_gets_its_own,
    test_every_location_in_prefill_and_decode,
    test_forced_samples_are_what_the_model_goes_on_with,
)
from tests.engine.harness import Block, watch
from tests.engine.plugin.test_plain_steps import OF_ADMISSION, OF_THE_RUNNER, OF_THE_SCHEDULER, ours_in
from tests.gpu.conftest import TOKENS


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each replay of a graph."""
    found: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def watched(graph: Any) -> None:
        found.append(id(graph))
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", watched)
    return found


def test_the_runner_is_the_one_asked_for(stock: object, bench: Bench, runner: str) -> None:
    bench.engine.plain(PROMPTS[0])  # whose first step finds that there is no block any more
    assert type(bench.engine.worker.model_runner).__name__ == f"GPURunnerV{2 if runner == '1' else 1}"


def test_plain_steps_replay_graphs_and_call_nothing_of_ours(
    stock: dict[tuple[int, ...], list[int]], bench: Bench, replays: list[int]
) -> None:
    bench.engine.run(Block(PROMPTS[0], "x = model.logits.output"))
    bench.engine.plain(PROMPTS[0])  # whose first step finds that there is no block any more
    replays.clear()
    called = ours_in(lambda: bench.engine.plain(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True)).calls.keys()
    assert called <= OF_THE_SCHEDULER | OF_THE_RUNNER | OF_ADMISSION
    assert len(replays) >= TOKENS - 1


def test_plain_requests_beside_traces_give_what_stock_vllm_gives(
    stock: dict[tuple[int, ...], list[int]], bench: Bench
) -> None:
    edit = "for s in tracer.iter[:]:\n    " + ("model.transformer.h" if bench.arch == "gpt2" else "model.model.layers")
    block = Block(PROMPTS[1], f"{edit}[1].mlp.output[:] = 0", {"max_tokens": 7, "ignore_eos": True})
    for traces in ([], [[block]], [[block], [block]]):
        rans = bench.engine.run_traces(list(traces), plain=tuple(PROMPTS), plain_tokens=TOKENS)
        assert [ran.failure for ran in rans] == [None] * len(rans)
        plain = [ran.token_ids for ran in rans[len(traces) :]]
        assert plain == [stock[tuple(one)] for one in PROMPTS]


def test_only_the_steps_with_a_live_block_run_eager(
    stock: object, bench: Bench, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = bench.engine.worker.model_runner
    execute = runner.execute_model
    seen: list[tuple[bool, bool, bool]] = []

    def watched(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        replays.clear()
        output = execute(scheduled, *args, **kwargs)
        if scheduled.num_scheduled_tokens:
            decode = max(scheduled.num_scheduled_tokens.values()) == 1
            seen.append((decode, runner.tracing, bool(replays)))
        return output

    watch(monkeypatch, runner, "execute_model", watched)
    source = "h = []\nfor s in tracer.iter[:4]:\n    h.append(model.logits.output.save())"
    rans = bench.engine.run_traces(
        [[Block(PROMPTS[0], source, {"max_tokens": 9, "ignore_eos": True})]], plain=(PROMPTS[1],), plain_tokens=TOKENS
    )
    assert rans[0].failure is None
    assert sum(traced for _, traced, _ in seen) == 4
    for decode, traced, replayed in seen:
        assert replayed == (not traced) or not decode
        assert not (traced and replayed)


def test_a_step_with_a_block_runs_on_the_kernels_of_an_eager_engine(
    stock: object, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = bench.engine.worker.model_runner
    parts = [part for part in runner.get_model().modules() if isinstance(part, CustomOp)]
    before = [part._forward_method for part in parts]
    begin = bench.engine.interleaver.begin_step
    seen: list[bool] = []

    def watched(batch: Any) -> None:
        seen.append(all(part._forward_method == part.forward_cuda for part in parts))
        begin(batch)

    monkeypatch.setattr(bench.engine.interleaver, "begin_step", watched)
    [ran] = bench.engine.run(Block(PROMPTS[0], "for s in tracer.iter[:3]:\n    model.logits.output", {"max_tokens": 5}))
    assert ran.failure is None, ran.failure
    assert parts
    assert seen == [True] * 3
    assert [part._forward_method for part in parts] == before
    assert not any(method == part.forward_cuda for part, method in zip(parts, before, strict=True))


def test_no_hook_is_left(stock: object, bench: Bench) -> None:
    model = bench.engine.worker.model_runner.get_model()
    bench.engine.run(Block(PROMPTS[0], "x = model.logits.output.save()"))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_captured_tensors_are_where_the_model_computes(bench: Bench) -> None:
    hidden = bench.oracle.config.hidden_size
    source = "h = model.logits.output\nwhere = [str(v.device), str(h.device)].save()\nt = (v * 2).save()"
    [ran] = bench.engine.run(Block(PROMPTS[0], source, captured={"v": torch.ones(hidden)}))
    assert ran.failure is None, ran.failure
    assert ran.saved["where"] == ["cuda:0", "cuda:0"]
    assert torch.equal(ran.saved["t"], torch.full((hidden,), 2.0))
