"""Requests join, finish, fail, stop and are cancelled in any order; each that survives gives what it gives alone.

Prompts are chunked, the prefix cache is on, the KV cache is too small for all, and the batch is reordered as attention
backends reorder it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from executor.core.ended import Ended
from interpose.cli.demo_model import write_demo_model
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb
from tests.engine.harness import Block, LocalEngine, Ran, lone_request, watch

REQUESTS = 160
AT_ONCE = 14
STEPS_WITHOUT_AN_END = 400
TOKENS = 10
READ = """\
hidden = model.model.layers[{layer}].mlp.output.save()
logits = []
for step in tracer.iter[:]:
    logits.append(model.logits.output.save())
"""
BLOCKS = {
    "read": READ,
    "edit the prompt": "model.model.layers[{early}].mlp.output[:] *= {scale}\n" + READ,
    "assign an input": "model.model.layers[{early}].mlp.input = model.model.layers[{early}].mlp.input * {scale}\n"
    + READ,
    "edit every step": """\
logits = []
for step in tracer.iter[:]:
    model.model.layers[{layer}].mlp.output[:, ::7] += {scale}
    logits.append(model.logits.output.save())
""",
    "choose the tokens": """\
for step in tracer.iter[:]:
    model.logits.output[:, {token} + step] += 100
logits = tracer.result.token_ids.save()
""",
    "stop": READ + "    if step == {end}:\n        tracer.stop()\n",
    "raise": READ + "    if step == {end}:\n        raise ValueError('{token} is its own')\n",
    "never reached": READ + "model.model.layers[{layer}].next().output\n",
    "out of order": "x = model.model.layers[3].output\ny = model.model.layers[{early}].output\n",
    "end early": "hidden = model.model.layers[{layer}].mlp.output.save()\n",
    "plain": "",
}


@dataclass
class Case:
    """One request, which may be submitted many times.

    Attributes:
        alone: what it gives when nothing else runs.
    """

    kind: str
    block: Block
    alone: Ran = field(default_factory=Ran)


class Crowd:
    """Drives an engine whose requests come and go.

    Args:
        engine: with nothing running.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.core = engine.llm.llm_engine
        self.running: dict[str, tuple[Case, pb.Trace | None]] = {}
        self._ids = itertools.count()

    def submit(self, case: Case) -> None:
        request_id = f"stress-{next(self._ids)}"
        prompt: dict[str, Any] = {"prompt_token_ids": case.block.prompt}
        sampling = {"temperature": 0.0, **case.block.sampling}
        trace = None
        if case.kind != "plain":
            trace = self.engine.trace([case.block], {})
            sampling["extra_args"] = lone_request(trace).to_args()
            prompt["cache_salt"] = request_id
        params = SamplingParams(**sampling, output_kind=RequestOutputKind.CUMULATIVE)
        self.core.add_request(request_id, prompt, params)
        self.running[request_id] = case, trace

    def cancel(self, request_id: str) -> None:
        _, trace = self.running.pop(request_id)
        self.core.abort_request([request_id])
        if trace is not None:
            self.engine.worker.interpose_drop(trace.id)

    def step(self) -> Iterator[tuple[Case, Ran]]:
        """Run a step; yield what ended in it."""
        for output in self.core.step():
            if not output.finished:
                continue
            case, trace = self.running.pop(output.request_id)
            completion = output.outputs[0]
            ran = Ran(list(completion.token_ids), completion.finish_reason or "")
            if trace is not None:
                result = Result(completion.text, ran.token_ids, ran.finish_reason, list(output.prompt_token_ids))
                ran.state, events, _ = self.engine.worker.interpose_finish(trace.id, 0, vars(result))
                self.engine.take(ran, events)
            yield case, ran


def cases(rng: random.Random) -> list[Case]:
    made = []
    for number in range(3 * len(BLOCKS)):
        kind = list(BLOCKS)[number % len(BLOCKS)]
        names = {
            "layer": rng.randrange(1, 4),
            "early": rng.randrange(0, 2),
            "scale": round(rng.uniform(-2, 2), 3),
            "token": rng.randrange(20, 300),
            "end": rng.randrange(0, 4),
        }
        source = BLOCKS[kind]
        for name, value in names.items():
            source = source.replace("{" + name + "}", str(value))
        tokens = rng.randrange(6, TOKENS)
        length = rng.choice([3, 20, 40, 64]) if kind != "plain" else rng.choice([30, 90, 150])
        prompt = [rng.randrange(5, 500) for _ in range(length)]
        sampling: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
        if number % 4 == 0:
            sampling["min_tokens"] = 5
        if number % 5 == 0:
            sampling |= {"temperature": 0.8, "seed": number}
        made.append(Case(kind, Block(prompt, source, sampling)))
    return made


def same(mine: object, alone: object) -> bool:
    if isinstance(mine, torch.Tensor):
        return isinstance(alone, torch.Tensor) and torch.allclose(mine, alone, atol=1e-4, rtol=1e-4)
    if isinstance(mine, list):
        return (
            isinstance(alone, list)
            and len(mine) == len(alone)
            and all(same(one, other) for one, other in zip(mine, alone, strict=True))
        )
    return mine == alone


def check(case: Case, ran: Ran) -> None:
    alone = case.alone
    assert ran.token_ids == alone.token_ids, case
    assert (ran.state, ran.finish_reason) == (alone.state, alone.finish_reason), case
    assert (ran.failure and ran.failure.message) == (alone.failure and alone.failure.message), case
    assert ran.saved.keys() == alone.saved.keys(), case
    for name, value in ran.saved.items():
        assert same(value, alone.saved[name]), (name, case)
    assert account(ran) == account(alone), case


def account(ran: Ran) -> pb.Accounting | None:
    """Return a run's accounting without the tiers and the seconds.

    Where plans run, the first run of a block may find no plan yet.
    """
    if ran.accounting is None:
        return None
    told = pb.Accounting()
    told.CopyFrom(ran.accounting)
    for name in ("tiers", "block_seconds", "seconds"):
        told.ClearField(name)
    return told


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    engine = LocalEngine(
        checkpoint,
        dtype="float32",
        block_size=32,
        num_gpu_blocks_override=14,
        max_num_seqs=7,
        max_num_batched_tokens=64,
    )
    yield engine
    engine.close()


def counting(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count what the test is about, so that it cannot pass without."""
    counts = dict.fromkeys(("evicted", "chunks", "swaps", "cached"), 0)
    scheduler, runner = engine.scheduler, engine.worker.model_runner
    preempt = scheduler._preempt_request

    def watched_schedule(*args: Any, **kwargs: Any) -> Any:
        output = type(scheduler).schedule(scheduler, *args, **kwargs)  # its class changes
        for request in output.scheduled_new_reqs:
            counts["cached"] += request.num_computed_tokens > 0
            counts["chunks"] += output.num_scheduled_tokens[request.req_id] < len(request.prompt_token_ids)
        return output

    def watched_preempt(*args: Any, **kwargs: Any) -> Any:
        counts["evicted"] += 1
        return preempt(*args, **kwargs)

    watch(monkeypatch, scheduler, "schedule", watched_schedule)
    watch(monkeypatch, scheduler, "_preempt_request", watched_preempt)
    if not isinstance(runner, GPUModelRunner):
        del counts["swaps"]  # the second runner lays the batch out anew in every step
        return counts
    swap = runner.input_batch.swap_states

    def watched_swap(*args: Any) -> Any:
        counts["swaps"] += 1
        return swap(*args)

    monkeypatch.setattr(runner.input_batch, "swap_states", watched_swap)
    # What an attention backend sets that wants decodes before prefills.
    monkeypatch.setattr(runner, "reorder_batch_threshold", 1)
    return counts


@pytest.mark.parametrize("seed", [1, 2])
def test_a_crowd(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    crowd = Crowd(engine)
    known = cases(rng)
    for case in known:
        crowd.submit(case)
        while crowd.running:
            for _, case.alone in crowd.step():
                pass
    kinds = {case.kind: case.alone for case in known}
    assert {kind for kind, ran in kinds.items() if ran.failure} == {"raise", "never reached", "out of order"}
    assert kinds["stop"].state is Ended.STOPPED

    counts = counting(engine, monkeypatch)
    left, quiet, ended, cancelled = REQUESTS, 0, 0, 0
    while left or crowd.running:
        while left and len(crowd.running) < AT_ONCE and rng.random() < 0.7:
            crowd.submit(rng.choice(known))
            left -= 1
        if crowd.running and rng.random() < 0.03:
            crowd.cancel(rng.choice(list(crowd.running)))
            cancelled += 1
        quiet += 1
        for case, ran in crowd.step():
            check(case, ran)
            ended += 1
            quiet = 0
        assert quiet < STEPS_WITHOUT_AN_END, f"stuck: {[case.kind for case, _ in crowd.running.values()]}"
    assert ended + cancelled == REQUESTS
    assert cancelled
    assert all(counts.values()), counts
    assert engine.interleaver.idle
    assert not engine.scheduler._traced
    assert engine.scheduler.kv_cache_manager.usage == 0, "blocks of the cache were not given back"
