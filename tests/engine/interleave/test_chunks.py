"""Prompts longer than a step: blocks see and change them as if they were in one step, beside other requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.core.ended import Ended
from interpose.cli.demo_model import Shape, write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import expression
from tests.engine.harness import EVERY_STEP, Block, LocalEngine, watch
from tests.oracle import Edit, Oracle, difference

STEP = 64
TOLERANCE = 1e-4
SHAPE = Shape(layers=2, hidden=128, context=512)
LENGTHS = (STEP + 1, 2 * STEP, 2 * STEP + 1, 301)
VECTOR = torch.linspace(-1, 1, SHAPE.hidden)
UNIT = VECTOR / VECTOR.norm()
AT = "blocks.0.resid_post"
LATER = "blocks.1.resid_post"
PLACES = [
    "blocks.0.resid_pre",
    "blocks.0.attn.q",
    "blocks.0.attn.rot_k",
    "blocks.0.attn.pattern",
    "blocks.0.attn.z",
    "blocks.0.resid_mid",
    "blocks.0.mlp.act",
    "blocks.1.attn.pattern",
    "blocks.1.resid_post",
]


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{tokens} {seed}")
    return [rng.randrange(5, 500) for _ in range(tokens)]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param, SHAPE)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint, canonical=True)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(checkpoint, dtype="float32", max_model_len=512, max_num_batched_tokens=STEP)
    yield engine
    assert engine.interleaver.idle and not engine.scheduler._traced
    engine.close()


READ = (
    "values = {}\n" + "".join(f"values[{path!r}] = {expression(path)}.save()\n" for path in PLACES) + "values.save()\n"
)


def check(values: dict[str, torch.Tensor], oracle: Oracle, ids: list[int]) -> None:
    truth = oracle.run(ids, 1)
    for path, value in values.items():
        assert difference(value, truth.value(path, "output", 0)) <= TOLERANCE, (len(ids), path)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_block_reads_the_whole_prompt_and_each_later_step(engine: LocalEngine, oracle: Oracle, tokens: int) -> None:
    ids = prompt(tokens)
    [ran] = engine.run(Block(ids, READ + EVERY_STEP, {"max_tokens": 4, "ignore_eos": True}))
    assert ran.failure is None, ran.failure
    check(ran.saved["values"], oracle, ids)
    truth = oracle.run(ids, 4)
    assert ran.token_ids == ran.saved["tokens"] == truth.tokens
    assert ran.accounting is not None and ran.accounting.prompt_tokens == tokens and ran.accounting.steps == 4
    for mine, theirs in zip(ran.saved["logits"], truth.logits, strict=True):
        assert difference(mine, theirs) <= TOLERANCE


def test_several_at_a_time_beside_short_and_plain_requests(engine: LocalEngine, oracle: Oracle) -> None:
    asked = [prompt(tokens, 1) for tokens in (*LENGTHS, 7, STEP)]
    plain = (prompt(40, 2), prompt(150, 2))
    *rans, one, other = engine.run_traces([[Block(ids, READ)] for ids in asked], plain=plain)
    for ids, ran in zip(asked, rans, strict=True):
        assert ran.failure is None, ran.failure
        check(ran.saved["values"], oracle, ids)
    assert [one.token_ids, other.token_ids] == [oracle.run(ids, 4).tokens for ids in plain]


CHANGES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "add a vector": ("h += v", lambda h: h + VECTOR),
    "scale by assignment": ("model.blocks[0].resid_post = h * 0.5", lambda h: h * 0.5),
    "set to a constant": ("h[:] = v", lambda h: VECTOR.expand_as(h)),
    "the last row": ("h[-1] = v", lambda h: torch.cat([h[:-1], VECTOR[None]])),
    "a row of an early chunk": ("h[3] += v", lambda h: torch.cat([h[:3], h[3:4] + VECTOR, h[4:]])),
    "rows across chunks": ("h[50:150] *= 0", lambda h: torch.cat([h[:50], h[50:150] * 0, h[150:]])),
    "rows by a list": ("h[[1, 100, -1]] = v", lambda h: h.index_put((torch.tensor([1, 100, -1]),), VECTOR)),
    "ablate a direction": ("h -= (h @ u)[:, None] * u", lambda h: h - (h @ UNIT)[:, None] * UNIT),
    "by each row's norm": ("h /= h.norm(dim=-1, keepdim=True)", lambda h: h / h.norm(dim=-1, keepdim=True)),
    "one column": ("h[:, 5] = 2.0", lambda h: torch.cat([h[:, :5], torch.full_like(h[:, :1], 2.0), h[:, 6:]], 1)),
    "where": ("h[:] = torch.where(h > 0, h, h * 0.1)", lambda h: torch.where(h > 0, h, h * 0.1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_each_row_by_itself(engine: LocalEngine, oracle: Oracle, change: str) -> None:
    code, apply = CHANGES[change]
    ids, beside = prompt(205, 3), prompt(130, 4)
    source = f"h = model.blocks[0].resid_post\n{code}\nlater = model.blocks[1].resid_post.save()\n{EVERY_STEP}"
    block = Block(ids, source, {"max_tokens": 3, "ignore_eos": True}, {"v": VECTOR, "u": UNIT})
    ran, other = engine.run_traces([[block], [Block(beside, READ)]])
    assert ran.failure is None, ran.failure
    seen: list[bool] = []

    def in_prompt(value: torch.Tensor) -> torch.Tensor:
        seen.append(value.shape[-2] > 1)
        return apply(value) if value.shape[-2] > 1 else value

    truth = oracle.run(ids, 3, [Edit(AT, "output", in_prompt)])
    assert seen.count(True) == 1
    assert difference(truth.logits[0], oracle.run(ids, 1).logits[0]) > 1e-3, "the change must show"
    assert difference(ran.saved["later"], truth.value(LATER, "output", 0)) <= TOLERANCE
    for mine, theirs in zip(ran.saved["logits"], truth.logits, strict=True):
        assert difference(mine, theirs) <= TOLERANCE
    assert ran.token_ids == truth.tokens
    check(other.saved["values"], oracle, beside)


def test_a_change_that_uses_an_earlier_layer_row_by_row(engine: LocalEngine, oracle: Oracle) -> None:
    ids = prompt(150, 5)
    source = (
        "early = model.blocks[0].resid_pre\nmodel.blocks[0].resid_post += early * 2\nl = model.logits.output.save()\n"
    )
    kept: list[torch.Tensor] = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept.append(value.clone())
        return value

    edits = [Edit("blocks.0.resid_pre", "output", keep), Edit(AT, "output", lambda value: value + kept[-1] * 2)]
    [ran] = engine.run(Block(ids, source))
    assert ran.failure is None, ran.failure
    assert difference(ran.saved["l"], oracle.run(ids, 1, edits).logits[0]) <= TOLERANCE


REFUSED = {
    "h += h.mean(0)": (2, "(mean)"),
    "h[:] = h.flip(0)": (2, "(flip)"),
    "h[3] = h[5]": (2, "(copy)"),
    "h += h[0]": (2, "(add)"),
    "h[:] = h.cumsum(0)": (2, "(cumsum)"),
    "h[:, :1] += model.logits(h)[:, :1]": (
        None,
        "a module that the block",
    ),
    "b = torch.zeros_like(h)\nb[1:] = h[:-1]\nh += b": (3, "(copy)"),
    "if h.sum() > 0:\n    h += 1": (2, "must not depend on values"),
    "x = h.sum().item()": (2, "must not depend on values"),
    "cache = tracer.cache(modules=[model.logits])": (None, "tracer.cache() records"),
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_needs_other_rows_is_refused_before_the_request_starts(engine: LocalEngine, code: str) -> None:
    line, why = REFUSED[code]
    ids = prompt(150, 6)
    block, beside = Block(ids, f"h = model.blocks[0].resid_post\n{code}\nl = h.save()\n"), prompt(90, 6)
    [ran, other] = engine.run(block, plain=(beside,))
    assert ran.failure is not None and ran.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT, ran.failure
    assert why in ran.failure.message and "max_num_batched_tokens" in ran.failure.message
    assert f"{len(ids)} tokens" in ran.failure.message and f"up to {STEP}" in ran.failure.message
    assert line is None or ran.failure.frames[-1].line == line
    assert not ran.saved and other.token_ids == engine.plain(beside).token_ids


def test_a_pattern_that_is_changed_by_is_refused(engine: LocalEngine) -> None:
    source = "p = model.blocks[0].attn.pattern\nmodel.blocks[0].attn.z[:, 0] *= p[0, :, 0].mean()\n"
    [ran] = engine.run(Block(prompt(150), source))
    assert ran.failure is not None and "the attention pattern" in ran.failure.message


def test_too_much_to_keep_is_refused(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = engine.worker.model_runner.interleaver._requests._host.budget
    monkeypatch.setattr(budget, "memory_bytes", 1 << 18)
    [ran] = engine.run(Block(prompt(300), READ))
    assert ran.failure is not None and ran.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED
    assert "block_memory_bytes" in ran.failure.message


def test_other_locations_than_on_shapes_are_refused(engine: LocalEngine) -> None:
    source = (
        "h = model.blocks[0].resid_post\n"
        "x = model.blocks[1].resid_mid if type(h).__name__ == 'Tensor' else model.blocks[1].attn.z\n"
        "x.save()\n"
    )
    [ran] = engine.run(Block(prompt(150), source))
    assert ran.failure is not None and "was not asked for when the block was followed" in ran.failure.message


def test_what_a_shadow_does_is_dropped(engine: LocalEngine) -> None:
    """A block that changes something runs in each chunk; it prints, saves and appends once."""
    source = (
        "print('once')\nh = model.blocks[0].resid_post\nh += 1\nseen.append(h.shape[0])\nseen.save()\n"
        "tracer.log('and once')\n"
    )
    [ran] = engine.run(Block(prompt(300), source, captured={"seen": []}))
    assert ran.failure is None and ran.logs.count("once") == 2, (ran.failure, ran.logs)
    assert list(ran.updates.values()) == [[300]] or ran.saved.get("seen") == [300]


@pytest.mark.parametrize("cached", [True, False], ids=["its blocks stay cached", "its blocks are gone"])
@pytest.mark.parametrize("changes", [False, True], ids=["reads", "changes"])
def test_a_request_that_is_evicted_in_the_middle(
    engine: LocalEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, changes: bool, cached: bool
) -> None:
    scheduler, steps = engine.scheduler, []
    schedule = scheduler.schedule

    def evicting(*args: Any, **kwargs: Any) -> Any:
        steps.append(len(scheduler.running))
        if len(steps) == 3 and scheduler.running:
            if not cached:
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
            else:
                scheduler._preempt_request(scheduler.running.pop(), 0.0)
        return schedule(*args, **kwargs)

    watch(monkeypatch, scheduler, "schedule", evicting)
    ids = prompt(260, 7 + cached)
    code = "h = model.blocks[0].resid_post\nh += v\n" if changes else "h = model.blocks[0].resid_post.save()\n"
    source = f"{code}later = model.blocks[1].resid_post.save()\n{EVERY_STEP}"
    [ran] = engine.run(Block(ids, source, {"max_tokens": 2, "ignore_eos": True}, {"v": VECTOR}))
    assert len(steps) >= 7 - cached and ran.failure is None, (steps, ran.failure)
    edits = [Edit(AT, "output", lambda h: h + VECTOR if h.shape[-2] > 1 else h)] if changes else []
    truth = oracle.run(ids, 2, edits)
    assert difference(ran.saved["later"], truth.value(LATER, "output", 0)) <= TOLERANCE
    assert ran.token_ids == truth.tokens
    assert max(difference(a, b) for a, b in zip(ran.saved["logits"], truth.logits, strict=True)) <= TOLERANCE


def test_a_number_that_is_not_finite_in_an_early_chunk_fails_its_request_alone(engine: LocalEngine) -> None:
    beside = prompt(120, 9)
    source = "model.blocks[0].resid_post[3] = float('nan')\n"
    alone = engine.plain(beside).token_ids
    ran, other = engine.run(Block(prompt(200, 9), source), plain=(beside,))
    assert ran.state is Ended.FAILED or ran.failure is None
    assert other.token_ids == alone and engine.plain(beside).token_ids == alone


def test_a_trace_that_is_given_up_in_the_middle_leaves_nothing(engine: LocalEngine) -> None:
    engine.give_up(Block(prompt(400), "h = model.blocks[0].resid_post\nh += 1\nh.save()\n"), 2)
    assert engine.interleaver.idle
