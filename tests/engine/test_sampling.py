"""Sampling parameters as traces send them: what vLLM would refuse is refused before anything runs, the rest is right."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from vllm import SamplingParams

from executor.outputs import output_event, result_of
from executor.sampling import checked
from interpose.outcome import Outcome, take_event
from interpose.result import Logprob, Result
from tests.engine.conftest import Bench
from tests.engine.harness import Block

PROMPT = [5, 400, 17, 99, 256]
SCHEMA = {"enum": ["Paris", "Rome"]}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too many logprobs": ({"logprobs": 21}, "logprobs"),
    "too many prompt logprobs": ({"prompt_logprobs": 21}, "logprobs"),
    "no such constraint": ({"structured_outputs": {"choise": ["a"]}}, "choice"),
    "two constraints": ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "one of"),
    "not a dict": ({"structured_outputs": ["a"]}, "a dict"),
    "no choice": ({"structured_outputs": {"choice": []}}, "empty"),
    "not a grammar": ({"structured_outputs": {"grammar": "root ::= ("}}, ""),
    "not a schema": ({"structured_outputs": {"json": "{"}}, ""),
    "a bias outside the vocabulary": ({"logit_bias": {100_000: 1.0}}, "vocab"),
    "a temperature below zero": ({"temperature": -1.0}, "temperature"),
}


def judged(bench: Bench, sampling: dict[str, Any]) -> dict[str, Any]:
    return checked(sampling, bench.engine.llm.llm_engine.vllm_config, bench.engine.llm.get_tokenizer())


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_is_refused_before(bench: Bench, name: str) -> None:
    sampling, words = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=words):
        judged(bench, sampling)


STRUCTURED: dict[str, tuple[dict[str, Any], Any]] = {
    "choice": ({"choice": ["Paris", "Rome"]}, lambda text: text in ("Paris", "Rome")),
    "regex": ({"regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
    "grammar": ({"grammar": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
    "json": ({"json": SCHEMA}, lambda text: json.loads(text) in SCHEMA["enum"]),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_outputs_of_a_traced_request(bench: Bench, name: str) -> None:
    """The block runs at every step, and sees the logits from which only the allowed tokens can come."""
    structured, right = STRUCTURED[name]
    sampling = judged(bench, {"structured_outputs": structured, "max_tokens": 60, "temperature": 0.0})
    source = (
        "steps, allowed = [].save(), [].save()\nfor s in tracer.iter[:]:\n    logits = model.logits.output\n"
        "    token = model.samples.output.item()\n    steps.append(token)\n    allowed.append(logits[0, token].item() > -1e9)\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source, sampling))
    assert ran.failure is None, ran.failure
    text = bench.engine.llm.get_tokenizer().decode(ran.token_ids, skip_special_tokens=True)
    assert right(text), text
    assert ran.saved["steps"] == ran.token_ids and all(ran.saved["allowed"])


def test_logprobs_are_those_of_the_forward(bench: Bench) -> None:
    """They travel step by step, and are what the logits of the oracle say."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    [output] = bench.engine.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    completion = output.outputs[0]
    result = result_of(output, completion, "length")
    outcome = Outcome(results={0: Result()})
    for sent, stop in ((0, 1), (1, 3)):
        part = type(completion)(**{**vars(completion), "token_ids": completion.token_ids[:stop]})
        part.logprobs = completion.logprobs[:stop]
        take_event(outcome, output_event(0, output, part, 0, sent, "length" if stop == 3 else ""))
    outcome.results[0].text = result.text
    assert outcome.results[0] == result == Result.from_plain(asdict(result))
    truth = bench.oracle.run(PROMPT, 3)
    assert result.logprobs is not None and result.prompt_logprobs is not None
    for step, token in enumerate(completion.token_ids):
        expected = truth.logits[step].reshape(-1).log_softmax(-1)
        assert len(result.logprobs[step]) == 2 and result.logprobs[step][token].rank == 1
        for i, one in result.logprobs[step].items():
            assert isinstance(one, Logprob) and abs(one.logprob - expected[i].item()) < 1e-3
    assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(PROMPT)
    assert all(place and token in place for place, token in zip(result.prompt_logprobs[1:], PROMPT[1:], strict=True))
