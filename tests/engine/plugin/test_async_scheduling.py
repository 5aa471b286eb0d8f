"""Traces in an engine that schedules a step before the one ahead of it has ended, as vLLM does on GPUs.

vLLM turns it off on CPUs, where nothing would overlap. Here it is on: the scheduler, the queue of two batches and the
runner's asynchronous output are the engine's own. Streams and events are vLLM's placeholders for CPUs, which have nothing to
wait for: everything a CPU does is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.outputs import AsyncModelRunnerOutput

from executor.core.ended import Ended
from executor.plugin.scheduler import InterposeAsyncScheduler
from interpose.cli.demo_model import write_demo_model
from interpose.v1.value_pb2 import Barrier, Value
from tests.engine.harness import EVERY_STEP, Block, LocalEngine, watch
from tests.oracle import Edit, Oracle, difference

PROMPT = [5, 400, 17, 99, 256]
OTHERS = ([3, 77], [12, 250, 33, 8, 441, 90, 14], [222])
TOLERANCE = 1e-4


def _schedule_ahead_on_cpus(patch: pytest.MonkeyPatch) -> None:
    stock = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def with_async(cls: Any, config: Any) -> None:
        stock(cls, config)
        config.scheduler_config.async_scheduling = True

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(with_async))


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalEngine, Oracle]]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    with pytest.MonkeyPatch.context() as patch:
        if current_platform.is_cpu():
            _schedule_ahead_on_cpus(patch)
        engine = LocalEngine(checkpoint, dtype="float32")
        assert isinstance(engine.scheduler, InterposeAsyncScheduler)
        yield engine, Oracle(checkpoint)
        assert engine.interleaver.idle
        engine.close()


@pytest.fixture
def engine(ahead: tuple[LocalEngine, Oracle]) -> LocalEngine:
    return ahead[0]


@pytest.fixture
def oracle(ahead: tuple[LocalEngine, Oracle]) -> Oracle:
    return ahead[1]


class Steps:
    """The requests of each step that ran, and which of them were scheduled before their step before had ended."""

    def __init__(self, engine: LocalEngine, patch: pytest.MonkeyPatch) -> None:
        self.ran: list[set[str]] = []
        self.ahead: list[set[str]] = []
        scheduler = engine.scheduler
        schedule = scheduler.schedule

        def watched(*args: Any) -> Any:
            pending = {one.request_id for one in scheduler.running if one.num_output_placeholders}
            output = schedule(*args)
            self.ran.append(set(output.num_scheduled_tokens))
            self.ahead.append(pending & set(output.num_scheduled_tokens))
            return output

        watch(patch, scheduler, "schedule", watched)


@pytest.fixture
def steps(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(engine, monkeypatch)


def test_plain_requests_are_scheduled_ahead_and_give_what_they_give(engine: LocalEngine, steps: Steps) -> None:
    plain = engine.plain(PROMPT, max_tokens=6, ignore_eos=True)
    assert sum(map(bool, steps.ahead)) == 5, "every step after the first is scheduled before its token is known"
    stopped = engine.plain(PROMPT, max_tokens=6, ignore_eos=True, stop_token_ids=[plain.token_ids[2]])
    assert list(stopped.token_ids) == list(plain.token_ids[:3])


def test_the_output_is_the_asynchronous_one(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = set()
    worker = engine.worker
    sample = worker.sample_tokens

    def watched(grammar: Any) -> Any:
        output = sample(grammar)
        kinds.add(type(output).__name__)
        assert isinstance(output, AsyncModelRunnerOutput)
        return output

    watch(monkeypatch, worker, "sample_tokens", watched)
    engine.run(Block(PROMPT, "x = model.logits.output", {"max_tokens": 4, "ignore_eos": True}))
    assert kinds in ({runner, "EndedAsyncOutput"} for runner in ("AsyncGPUModelRunnerOutput", "AsyncOutput"))


def test_a_loop_sees_its_own_steps_and_the_others_go_on(engine: LocalEngine, oracle: Oracle, steps: Steps) -> None:
    alone = [list(engine.plain(one, max_tokens=8).token_ids) for one in OTHERS]
    steps.ran.clear()
    [ran, *plain] = engine.run_traces(
        [[Block(PROMPT, EVERY_STEP, {"max_tokens": 5, "ignore_eos": True})]], plain=OTHERS, plain_tokens=8
    )
    truth = oracle.run(PROMPT, 5)
    assert ran.failure is None, ran.failure
    assert ran.token_ids == ran.saved["tokens"] == truth.tokens
    for logits, expected in zip(ran.saved["logits"], truth.logits, strict=True):
        assert difference(logits, expected) <= TOLERANCE
    assert [one.token_ids for one in plain] == alone
    traced = next(one for one in steps.ran[0] if sum(one in step for step in steps.ran) == 5)
    together = [traced in step for step in steps.ran if step]
    assert together[:5] == [True] * 5, "no request sits out"


def test_a_request_that_stop_strings_end_sits_out(engine: LocalEngine, steps: Steps) -> None:
    """The worker cannot find the end of a stop string, so the scheduler must have the token first."""
    sampling = {"max_tokens": 5, "ignore_eos": True, "stop": ["no such text"]}
    [ran, *_] = engine.run_traces([[Block(PROMPT, EVERY_STEP, sampling)]], plain=OTHERS, plain_tokens=9)
    assert ran.failure is None, ran.failure
    traced = next(one for one in steps.ran[0] if sum(one in step for step in steps.ran) == 5)
    together = [traced in step for step in steps.ran if step]
    assert together[:9] == [True, False] * 4 + [True], "the others have every step, the traced request every second"


@pytest.mark.parametrize("end", ["eos", "stop_token_ids"])
def test_a_token_that_a_block_writes_ends_its_request(engine: LocalEngine, steps: Steps, end: str) -> None:
    """The request has rows in one more step, in which its block has no part."""
    eos = engine.llm.get_tokenizer().eos_token_id
    token = eos if end == "eos" else 40
    sampling = {"max_tokens": 12} if end == "eos" else {"max_tokens": 12, "ignore_eos": True, "stop_token_ids": [token]}
    source = (
        "rows = []\nfor s in tracer.iter[:]:\n    rows.append(model.model.layers[0].output[0].save())\n"
        f"    model.samples.output[:] = {token} if s == 2 else 41\n    print(s)\n"
    )
    [ran, *_] = engine.run_traces([[Block(PROMPT, source, sampling)]], plain=OTHERS, plain_tokens=9)
    assert ran.failure is None, ran.failure
    assert ran.token_ids == [41, 41, token] and ran.finish_reason == "stop"
    assert len(ran.saved["rows"]) == 3 and ran.logs.split() == ["0", "1", "2"]
    assert ran.accounting is not None and ran.accounting.steps == 3
    traced = next(one for one in steps.ran[0] if sum(one in step for step in steps.ran) == 4)
    assert [traced in step for step in steps.ran if step][:5] == [True] * 4 + [False]


@pytest.mark.parametrize(
    "sampling", [{"stop_token_ids": 2}, {"stop": 3}, {"stop": 3, "min_tokens": 6}, {"max_tokens": 4}]
)
def test_no_block_sees_a_step_whose_token_is_not_in_the_result(
    engine: LocalEngine, sampling: dict[str, Any], steps: Steps
) -> None:
    free = engine.plain(PROMPT, max_tokens=9, ignore_eos=True)
    ids = list(free.token_ids)
    tokenizer = engine.llm.get_tokenizer()
    given: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, **sampling}
    if "stop_token_ids" in given:
        given["stop_token_ids"] = [ids[given["stop_token_ids"]]]
    if "stop" in given:
        given["stop"] = [tokenizer.decode(ids[given["stop"] : given["stop"] + 2])]
    plain = engine.plain(PROMPT, **given)
    steps.ran.clear()
    [ran] = engine.run(Block(PROMPT, EVERY_STEP, given))
    assert ran.failure is None, ran.failure
    assert ran.token_ids == ran.saved["tokens"] == list(plain.token_ids)
    assert ran.saved["result"].text == plain.text
    assert ran.accounting is not None
    assert ran.accounting.steps == len(ran.token_ids)
    late = "stop_token_ids" in given  # Its request is in one more step, without its block.
    assert sum(map(bool, steps.ran)) == len(ran.token_ids) + late


@pytest.mark.parametrize(("end", "state"), [("tracer.stop()", Ended.STOPPED), ("1 / 0", Ended.FAILED)])
def test_a_block_ends_its_request_in_the_very_step(engine: LocalEngine, end: str, state: Ended, steps: Steps) -> None:
    source = f"first = model.logits.output.save()\nfor step in tracer.iter[2:]:\n    {end}\n"
    [ran, *_] = engine.run_traces(
        [[Block(PROMPT, source, {"max_tokens": 30, "ignore_eos": True})]], plain=OTHERS, plain_tokens=12
    )
    assert ran.state is state
    assert len(ran.token_ids) == 3


def test_an_edited_token_is_what_the_model_goes_on_with(engine: LocalEngine, oracle: Oracle) -> None:
    source = (
        "out = []\nfor s in tracer.iter[:]:\n"
        "    out.append(model.logits.output.save())\n    model.samples.output[:] = 40 + s"
    )
    rans = engine.run_traces(
        [[Block(PROMPT, source, {"max_tokens": 5, "ignore_eos": True})]], plain=OTHERS, plain_tokens=9
    )
    truth = oracle.run(PROMPT, 5, force=[40, 41, 42, 43])
    assert rans[0].token_ids == [40, 41, 42, 43, 44]
    for logits, expected in zip(rans[0].saved["out"], truth.logits, strict=True):
        assert difference(logits, expected) <= TOLERANCE


def test_an_edit_beside_others_and_penalties(engine: LocalEngine, oracle: Oracle) -> None:
    """Penalties look at tokens that are still on their way for requests that are a step ahead."""
    sampling = {"max_tokens": 6, "ignore_eos": True}
    edit = "for s in tracer.iter[:]:\n    model.model.layers[1].mlp.output[:] = 0"
    penalized = {**sampling, "repetition_penalty": 1.7, "presence_penalty": 0.5}
    alone = list(engine.plain(PROMPT, **penalized).token_ids)
    blocks = [Block(PROMPT, edit, sampling), Block(PROMPT, EVERY_STEP, penalized), Block(OTHERS[1], edit, sampling)]
    rans = engine.run_traces([[block] for block in blocks], plain=OTHERS, plain_tokens=9)
    assert [ran.failure for ran in rans] == [None] * 6
    zero = [Edit("model.layers.1.mlp", "output", lambda value: value * 0)]
    assert rans[0].token_ids == oracle.run(PROMPT, 6, zero).tokens
    assert rans[1].token_ids == rans[1].saved["tokens"] == alone
    assert rans[2].token_ids == oracle.run(OTHERS[1], 6, zero).tokens


def test_a_request_whose_block_only_read_is_scheduled_ahead(engine: LocalEngine, steps: Steps) -> None:
    plain = list(engine.plain(PROMPT, max_tokens=6, ignore_eos=True).token_ids)
    steps.ahead.clear()
    ended: list[dict[str, Ended]] = []
    update = engine.scheduler.update_from_output

    def watched(scheduled: Any, output: Any) -> Any:
        ended.append(getattr(output, "ended", {}))
        return update(scheduled, output)

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, engine.scheduler, "update_from_output", watched)
        [ran] = engine.run(Block(PROMPT, "x = model.logits.output.save()", {"max_tokens": 6, "ignore_eos": True}))
    assert ran.token_ids == plain
    assert [list(one.values()) for one in ended if one] == [[Ended.READ_ONLY]]
    assert sum(map(bool, steps.ahead)) == 5, "every step after the first"


def test_invokes_of_one_step_stay_together(engine: LocalEngine, steps: Steps) -> None:
    blocks = [Block(one, EVERY_STEP, {"max_tokens": 5, "ignore_eos": True}, gang=2) for one in (PROMPT, OTHERS[1])]
    rans = engine.run_traces([blocks], plain=OTHERS, plain_tokens=9)
    assert [ran.failure for ran in rans] == [None] * 5
    members = {one for one in set.union(*steps.ran) if sum(one in step for step in steps.ran) == 5}
    assert len(members) == 2
    assert all(members & step in (set(), members) for step in steps.ran), "the group was torn apart"


def test_invokes_that_run_together_stay_in_step(engine: LocalEngine, oracle: Oracle) -> None:
    """A barrier in every step, and a block that sees both prompts' rows until the shorter one has ended."""
    ends = {"ignore_eos": True}
    held = {"barrier": Value(barrier=Barrier(number=0, count=2))}
    loop = "rows = []\nfor step in tracer.iter[:3]:\n    barrier()\n    rows.append(model.logits.output.save())\n"
    both = [Block(PROMPT, loop, {**ends, "max_tokens": 3}, captured=held, gang=2)]
    both += [Block(OTHERS[0], loop, {**ends, "max_tokens": 3}, captured=held, gang=2)]
    seen = "rows = []\nfor step in tracer.iter[:]:\n    rows.append(model.logits.output.save())\n"
    whole = [Block(OTHERS[1], "", {**ends, "max_tokens": 4}, gang=2)]
    whole += [Block(OTHERS[2], "", {**ends, "max_tokens": 2}, gang=2), Block([], seen, joint=True)]
    one, other, _, _, all_rows, plain = engine.run_traces([both, whole], plain=([44, 45, 46],), plain_tokens=5)
    for ran, prompt in ((one, PROMPT), (other, OTHERS[0])):
        assert ran.failure is None, ran.failure
        for found, expected in zip(ran.saved["rows"], oracle.run(prompt, 3).logits, strict=True):
            assert difference(found, expected) <= TOLERANCE
    assert all_rows.failure is None, all_rows.failure
    truths = [oracle.run(OTHERS[1], 4).logits, oracle.run(OTHERS[2], 2).logits]
    for step, found in enumerate(all_rows.saved["rows"]):
        assert difference(found, torch.cat([truth[step] for truth in truths if step < len(truth)])) <= TOLERANCE
    assert plain.token_ids == oracle.run([44, 45, 46], 5).tokens
