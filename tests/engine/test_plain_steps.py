"""Steps without a live mediator are the engine's own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import executor
from tests.engine.conftest import Bench
from tests.engine.harness import Block

PROMPT = [5, 400, 17, 99, 256]
_HOME = str(Path(executor.__file__).parent)
# The runner's overrides, each of which tests one attribute and calls vLLM's own.
PASS_THROUGH = {
    "execute_model",
    "_begin",
    "_determine_batch_execution_and_padding",
    "_model_forward",
    "_sample",
    "sample_tokens",
    "_admit",
    "from_args",
    "update_from_output",
    "_update_request_with_output",
    "schedule",
    "add_request",
    "_free_request",
    "_reserve_prefill_lookahead",
    "_handle_blocked_waiting_request",
    "prepare_inputs",
    "sample",
    "<lambda>",
}


def called_in(run: Any) -> set[str]:
    """Names of the functions of ours that `run` calls."""
    names = set()

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_HOME):
            names.add(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def test_plain_steps_call_nothing_of_ours_but_the_tests(bench: Bench) -> None:
    bench.engine.run(Block(PROMPT, "x = model.logits.output"))
    assert called_in(lambda: bench.engine.plain(PROMPT, max_tokens=5, ignore_eos=True)) <= PASS_THROUGH
    model = bench.engine.worker.model_runner.get_model()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_steps_after_a_block_has_ended_are_plain(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that reads the prompt only costs nothing while its request goes on generating."""
    runner = bench.engine.worker.model_runner
    traced: list[bool] = []
    execute = runner.execute_model

    def watch(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        output = execute(scheduled, *args, **kwargs)
        if scheduled.num_scheduled_tokens:
            traced.append(runner.tracing)
        return output

    monkeypatch.setattr(runner, "execute_model", watch)
    bench.engine.run(
        Block(PROMPT, "x = model.logits.output\nr = tracer.result.save()", {"max_tokens": 5, "ignore_eos": True})
    )
    assert traced == [True, False, False, False, False]
