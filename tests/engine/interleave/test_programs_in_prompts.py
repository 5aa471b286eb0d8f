"""Autoencoders and probes run in the prompt's step as programs, and their requests need no block to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from executor.core.ended import Ended
from tests.engine.block.test_accounting import account
from tests.engine.harness import Block, LocalEngine, Ran
from tests.engine.interleave.test_deferred import STEERS, UNLIKE, counted, ended, finished_at_once
from tests.engine.interleave.test_loops_in_tables import HIDDEN, PROMPTS, STEPS, block, in_tables, loop

FEATURES = 48
H = "h = model.model.layers[0].output[0]\n"
AUTOENCODER = loop(H + "f = torch.relu(h @ W + b)\nh[:] += 0.1 * (f @ D - h)\nkept.append(f[-1].topk(4).values.save())")
PROBE = loop(H + "kept.append(torch.relu(h @ W).topk(4).values.save())")
LAST = loop(H + "h[-1] += torch.tanh(h[-1] @ W) @ D\nkept.append(h[-1].save())")
TEXTS = {"autoencoder": AUTOENCODER, "probe": PROBE, "last row": LAST}


def constants(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    sizes = {"W": (HIDDEN, FEATURES), "b": (FEATURES,), "D": (FEATURES, HIDDEN)}
    return {name: 0.2 * torch.randn(size, generator=made) for name, size in sizes.items()}


def request(text: str, length: int, seed: int = 0, **sampling: Any) -> Block:
    prompt = [5 + (37 * i) % 480 for i in range(length)]
    return replace(block(text, 0, **sampling), prompt=prompt, captured=constants(seed))


def near(one: Ran, other: Ran) -> None:
    """Compare two runs up to rounding, which depends on the number of rows in a product."""
    assert one.state is Ended.DONE and other.state is Ended.DONE, (one.failure, other.failure)
    assert one.token_ids == other.token_ids
    assert [value.shape for value in one.saved["kept"]] == [value.shape for value in other.saved["kept"]]
    for mine, theirs in zip(one.saved["kept"], other.saved["kept"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TEXTS)
def test_all_steps_are_in_the_tables_and_later_requests_are_deferred(
    engines: tuple[LocalEngine, LocalEngine], name: str
) -> None:
    """Prompts of three lengths, the last between the others, each twice and with other constants the second time."""
    [single] = engines[1].run(request(TEXTS[name], 1))
    near(engines[0].run(request(TEXTS[name], 1))[0], single)
    for length, known in ((4, 1), (19, 1), (11, 0)):
        before = in_tables(engines[1]), ended(engines[1])
        for seed in (0, 1):
            one, other = (engine.run(request(TEXTS[name], length, seed))[0] for engine in engines)
            near(one, other)
            told = account(other)
            assert told.tiers == {"graph": STEPS} and told.steps == STEPS
        assert in_tables(engines[1]) - before[0] == 2 * STEPS, engines[1].interleaver.loops.refused
        assert ended(engines[1]) - before[1] == known


def test_a_deferred_request_is_counted_as_its_block_is(engines: tuple[LocalEngine, LocalEngine]) -> None:
    tables = engines[1]
    for text in TEXTS.values():
        first, second = (tables.run(request(text, 7))[0] for _ in range(2))
        assert counted(first) == counted(second)


def test_prompts_beside_each_other_and_beside_later_steps(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """More requests than the batch has places: prompts of all lengths beside rows of one, plain requests and taps."""
    kinds = [*TEXTS.values(), STEERS]
    for _ in range(2):
        rans = []
        for engine in engines:
            blocks = [
                replace(
                    request(kinds[i % 4], 2 + (5 * i) % 14, i % 3, max_tokens=1 + (3 * i) % 8),
                    captured={**constants(i % 3), "vector": torch.linspace(-1, 1, HIDDEN)},
                )
                for i in range(20)
            ]
            rans.append(engine.run_traces([[one] for one in blocks], plain=(PROMPTS[2],) * 2, plain_tokens=12))
        for one, other in zip(*rans, strict=True):
            assert one.token_ids == other.token_ids
            if one.state is not None:
                near(one, other)


def test_a_prompt_that_finds_no_room_runs_as_its_block(
    engines: tuple[LocalEngine, LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of the prompt's rows have no place, so that the loop goes into the tables after the prompt's step."""
    tables = engines[1].interleaver.loops._tables
    monkeypatch.setattr(tables._areas[1], "take", tables._areas[0].take)
    monkeypatch.setattr(tables._areas[1], "give", tables._areas[0].give)
    free = tables._areas[0].take(tables._areas[0].size - 4 * 4 * STEPS)
    before = in_tables(engines[1])
    try:
        one, other = (engine.run(request(PROBE, 40, max_tokens=STEPS))[0] for engine in engines)
    finally:
        tables._areas[0].give(free)
    near(one, other)
    assert in_tables(engines[1]) - before == STEPS - 1


@pytest.mark.parametrize("name", TEXTS)
def test_a_request_that_is_evicted_ends_as_its_block_does(engines: tuple[LocalEngine, LocalEngine], name: str) -> None:
    tables = engines[1]

    def evict(step: int, keys: list[str]) -> None:
        if step == 4:  # as the runner does when the engine computes a request anew
            tables.interleaver.preempted(keys[0])

    rans = []
    for before in ("", UNLIKE):
        text = TEXTS[name].replace("kept = [].save()\n", "kept = [].save()\n" + before)
        for _ in range(2):
            [ran] = finished_at_once(tables, [request(text, 6)], evict)
        rans.append(ran)
    one, other = rans
    assert one.state is other.state
    if one.state is Ended.DONE:
        near(one, other)
        assert counted(one) == counted(other)
    else:
        assert one.failure is not None and other.failure is not None and one.failure.message == other.failure.message


def test_a_request_that_is_given_up_leaves_nothing(engines: tuple[LocalEngine, LocalEngine]) -> None:
    tables = engines[1]
    tables.run(request(AUTOENCODER, 6))
    for steps in (1, 4):
        tables.give_up(request(AUTOENCODER, 6), steps)
        assert tables.interleaver.idle and not tables.interleaver.loops
