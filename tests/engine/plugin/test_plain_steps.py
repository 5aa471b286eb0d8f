"""Steps without a live mediator are the engine's own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.platforms import current_platform

import executor
from tests.engine.conftest import Bench
from tests.engine.harness import Block, watch

PROMPT = [5, 400, 17, 99, 256]
_HOME = str(Path(executor.__file__).parent)
# Overrides that look whether a step, or a request that is new in it, has a block, and go on in vLLM's own method.
OF_THE_SCHEDULER = {"schedule", "update_from_output", "get_num_unfinished_requests"}
OF_THE_RUNNER = {
    "execute_model",
    "_determine_batch_execution_and_padding",
    "_model_forward",
    "_sample",
    "sample_tokens",
}
OF_THE_RUNNER |= {"prepare_inputs", "prepare_attn", "sample"}
OF_ADMISSION = {"_enqueue_waiting_request", "from_args", "_execute", "_begin", "_admit", "sample_tokens"}
# What a plain step may cost, whatever its size, and for each request in it; and a request, once. Calls of ours, lines that run
# in them, and builtins that they call.
OF_A_STEP = (7, 15, 0) if current_platform.is_cpu() else (8, 20, 0)  # The V2 runner's methods have more lines.
OF_EACH_REQUEST_IN_IT = (0, 0, 0)
OF_A_REQUEST = (6, 30, 0)


@dataclass
class Ours:
    """What of ours ran, by function: how often each was called, how many lines it ran, how many builtins it called."""

    calls: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    builtins: Counter[str] = field(default_factory=Counter)

    @property
    def totals(self) -> np.ndarray:
        return np.array([self.calls.total(), self.lines.total(), self.builtins.total()])


def ours_in(run: Callable[[], object]) -> Ours:
    """Return what of ours ran while `run` did."""
    ours = Ours()

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(_HOME):
            (ours.calls if event == "call" else ours.builtins)[frame.f_code.co_name] += 1

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            ours.lines[frame.f_code.co_name] += 1
        return trace if frame.f_code.co_filename.startswith(_HOME) else None

    before = sys.gettrace()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        sys.settrace(before)
    return ours


def plain(bench: Bench, tokens: int, requests: int = 1) -> Ours:
    """Return what of ours runs while plain requests generate."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": [number, *PROMPT]} for number in range(requests)]
    return ours_in(lambda: bench.engine.llm.generate(prompts, params, use_tqdm=False))


def test_plain_steps_call_nothing_of_ours_but_the_tests(bench: Bench) -> None:
    bench.engine.run(Block(PROMPT, "x = model.logits.output"))
    bench.engine.plain(PROMPT)  # whose first step finds that there is no block any more
    assert plain(bench, tokens=5).calls.keys() <= OF_THE_SCHEDULER | OF_THE_RUNNER | OF_ADMISSION
    model = bench.engine.worker.model_runner.get_model()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_plain_steps_and_requests_cost(bench: Bench) -> None:
    """Calls, lines and builtins of ours: they do not depend on what ran before, nor grow with a request's length."""
    bench.engine.run(Block(PROMPT, "x = model.logits.output"))
    bench.engine.plain(PROMPT)  # whose first step finds that there is no block any more
    short, long = plain(bench, tokens=5).totals, plain(bench, tokens=9).totals
    step = (long - short) / 4
    assert np.array_equal(plain(bench, tokens=13).totals, long + 4 * step)
    crowd = (plain(bench, tokens=9, requests=8).totals - plain(bench, tokens=5, requests=8).totals) / 4
    each = (crowd - step) / 7
    assert (each <= OF_EACH_REQUEST_IN_IT).all(), each
    assert step[0] > 0 and (step - each <= OF_A_STEP).all(), step - each
    # Where steps are scheduled ahead, a request may be in one more than it has tokens.
    steps = 5 + bool(bench.engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    assert (short - steps * step <= OF_A_REQUEST).all(), short - steps * step


def test_steps_after_a_block_has_ended_are_plain(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that reads the prompt only costs nothing while its request goes on generating."""
    runner = bench.engine.worker.model_runner
    traced: list[bool] = []
    execute = runner.execute_model

    def watched(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        output = execute(scheduled, *args, **kwargs)
        if scheduled.num_scheduled_tokens:
            traced.append(runner.tracing)
        return output

    watch(monkeypatch, runner, "execute_model", watched)
    bench.engine.run(
        Block(PROMPT, "x = model.logits.output\nr = tracer.result.save()", {"max_tokens": 5, "ignore_eos": True})
    )
    assert traced == [True, False, False, False, False]
