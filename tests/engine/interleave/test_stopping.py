"""However a generation ends, a loop over its steps sees those whose tokens are in the result, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from executor.core.ended import Ended
from tests.engine.conftest import Bench
from tests.engine.harness import EVERY_STEP, Block

PROMPT = [5, 400, 17, 99, 256]
TOKENS = 12


@pytest.fixture
def free(bench: Bench) -> Any:
    """What is generated when nothing ends it early."""
    return bench.engine.plain(PROMPT, max_tokens=TOKENS, ignore_eos=True)


def word(bench: Bench, tokens: list[int]) -> str:
    return bench.engine.llm.get_tokenizer().decode(tokens)


@pytest.fixture
def aborted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that the front end had to abort, because the scheduler had not ended them."""
    core = bench.engine.llm.llm_engine.engine_core
    abort = core.abort_requests
    ids: list[str] = []

    def watched(request_ids: list[str]) -> None:
        ids.extend(request_ids)
        abort(request_ids)

    monkeypatch.setattr(core, "abort_requests", watched)
    return ids


def endings(bench: Bench, tokens: list[int]) -> list[dict[str, Any]]:
    string = word(bench, tokens[3:5])
    later = word(bench, tokens[6:8])
    return [
        {"max_tokens": 1},
        {"max_tokens": 7},
        {"stop_token_ids": [tokens[4]]},
        {"stop_token_ids": [tokens[4]], "min_tokens": 2},
        {"stop": [string]},
        {"stop": ["never there", later], "include_stop_str_in_output": True},
        {"stop": [string], "min_tokens": 9},
        {"stop": [later], "min_tokens": 3, "max_tokens": 6},
    ]


def test_a_loop_sees_the_steps_of_the_result(bench: Bench, free: Any, aborted: list[str]) -> None:
    reasons = []
    for sampling in endings(bench, free.token_ids):
        sampling = {"max_tokens": TOKENS, "ignore_eos": True, **sampling}
        plain = bench.engine.plain(PROMPT, **sampling)
        aborted.clear()
        block = Block(PROMPT, EVERY_STEP, sampling)
        [ran] = bench.engine.run(block)
        assert ran.failure is None, ran.failure
        assert not aborted, f"the scheduler let it run on past {sampling}"
        assert ran.token_ids == list(plain.token_ids), sampling
        assert (ran.finish_reason, ran.saved["result"].text) == (plain.finish_reason, plain.text), sampling
        reasons.append(ran.finish_reason)
        assert ran.saved["tokens"] == ran.token_ids, sampling
        assert len(ran.saved["logits"]) == len(ran.token_ids), sampling
    assert reasons.count("stop") >= 3, reasons
    assert reasons.count("length") >= 2, reasons


def test_a_plain_stop_string_is_found_as_stock(bench: Bench, free: Any) -> None:
    string = word(bench, free.token_ids[3:5])
    plain = bench.engine.plain(PROMPT, max_tokens=TOKENS, ignore_eos=True, stop=[string])
    assert plain.stop_reason == string
    assert len(plain.token_ids) < TOKENS


@pytest.mark.parametrize(("end", "state"), [("tracer.stop()", Ended.STOPPED), ("1 / 0", Ended.FAILED)])
def test_a_block_ends_its_request_at_once_whatever_the_sampling_says(bench: Bench, end: str, state: Ended) -> None:
    source = f"first = model.logits.output.save()\nfor step in tracer.iter[2:]:\n    {end}\nnever = [1].save()"
    sampling = {"max_tokens": 50, "min_tokens": 40, "ignore_eos": True, "stop": ["never there"]}
    [ran] = bench.engine.run(Block(PROMPT, source, sampling))
    assert ran.state is state
    assert len(ran.token_ids) == 3
    assert set(ran.saved) == ({"first"} if state is Ended.STOPPED else set())
