"""Tokens are guessed for plain requests beside traced ones, whose blocks see accepted tokens alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import EVERY_STEP, Block, LocalEngine, watch
from tests.oracle import Edit, Oracle, difference

PROMPT = [5, 400, 17, 99, 256, 31, 8]
PLAIN = ([5, 6, 7, 8] * 5, [9, 9, 9, 9, 9, 9], [100, 200] * 6)
STEPS = 16
ENDS = {"max_tokens": STEPS, "ignore_eos": True}
GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TOLERANCE = 1e-4
VECTOR = torch.linspace(-2, 2, 128)
# A block that changes every step and keeps the tokens that the model goes on with.
CHANGING = """\
tokens = []
for step in tracer.iter[:]:
    {change}
    tokens.append(model.samples.output.item())
tokens.save()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(layers=2, hidden=128, context=256)
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", shape)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint, canonical=True)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(checkpoint, dtype="float32", speculative_config=GUESSING)
    yield engine
    assert engine.interleaver.idle and not engine.scheduler._traced
    engine.close()
    # vLLM finds n-grams with numba. When the next engine of this process starts, vLLM looks at the attributes of all modules, and
    # stumbles over one of this module, whose `__dict__` is no dict.
    sys.modules.pop("llvmlite.binding.ffi", None)


class Steps:
    """The rows of each request in the steps, and the guesses among them."""

    def __init__(self, engine: LocalEngine, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[dict[str, int]] = []
        self.guesses: list[dict[str, int]] = []
        schedule = engine.scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.rows.append(dict(output.num_scheduled_tokens))
            self.guesses.append({one: len(some) for one, some in output.scheduled_spec_decode_tokens.items()})
            return output

        watch(patch, engine.scheduler, "schedule", noted)


def test_blocks_read_accepted_tokens_beside_guesses(
    engine: LocalEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(engine, monkeypatch)
    prompts = [PROMPT, [9, 9, 9, 9, 9], [5, 6, 7, 8] * 4]
    source = f"h = model.blocks[1].resid_post.save()\n{EVERY_STEP}"
    *rans, one, two, three = engine.run_traces(
        [[Block(ids, source, ENDS)] for ids in prompts], plain=PLAIN, plain_tokens=60
    )
    for ids, ran in zip(prompts, rans, strict=True):
        truth = oracle.run(ids, STEPS)
        assert ran.failure is None and ran.token_ids == ran.saved["tokens"] == truth.tokens
        assert difference(ran.saved["h"], truth.value("blocks.1.resid_post", "output", 0)) <= TOLERANCE
        for mine, theirs in zip(ran.saved["logits"], truth.logits, strict=True):
            assert mine.shape == (1, theirs.shape[-1]) and difference(mine, theirs) <= TOLERANCE
    for ids, plain in zip(PLAIN, (one, two, three), strict=True):
        assert plain.token_ids == oracle.run(ids, len(plain.token_ids)).tokens
    beside = [guesses for rows, guesses in zip(steps.rows, steps.guesses, strict=True) if len(rows) > len(PLAIN)]
    assert sum(bool(guesses) for guesses in beside) > 3, "no step had guesses beside blocks"
    requests = {request for rows in steps.rows for request in rows}
    guessed = {request for guesses in steps.guesses for request in guesses}
    assert 0 < len(guessed) <= len(PLAIN) < len(requests), "tokens were guessed for a traced request"


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        ("model.blocks[0].resid_post += v", None),
        ("model.logits.output[:, 77] = 1e4", [77] * STEPS),
        ("model.logits.output = torch.roll(model.logits.output, 1, -1)", None),
        ("model.samples.output[:] = 50 + step", list(range(50, 50 + STEPS))),
    ],
)
def test_blocks_change_what_they_like_beside_guesses(
    engine: LocalEngine, oracle: Oracle, change: str, tokens: list[int] | None
) -> None:
    block = Block(PROMPT, CHANGING.format(change=change), ENDS, {"v": VECTOR})
    changed, *plain = engine.run_traces([[block]], plain=PLAIN, plain_tokens=40)
    assert changed.failure is None, changed.failure
    if tokens is None:
        path = "logits" if "logits" in change else "blocks.0.resid_post"
        edit = Edit(path, "output", lambda x: x.roll(1, -1) if path == "logits" else x + VECTOR)
        tokens = oracle.run(PROMPT, STEPS, [edit]).tokens
    assert changed.token_ids == changed.saved["tokens"] == tokens
    for ids, ran in zip(PLAIN, plain, strict=True):
        assert ran.token_ids == oracle.run(ids, len(ran.token_ids)).tokens


def test_a_request_whose_block_has_ended_is_guessed_again(
    engine: LocalEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, ids = Steps(engine, monkeypatch), [9] * 8
    [ran] = engine.run(Block(ids, "h = model.blocks[1].resid_post.save()\n", {"max_tokens": 60, "ignore_eos": True}))
    truth = oracle.run(ids, 60)
    assert difference(ran.saved["h"], truth.value("blocks.1.resid_post", "output", 0)) <= TOLERANCE
    assert ran.token_ids == truth.tokens and any(steps.guesses)
