"""Sampling parameters as traces send them: what vLLM would refuse is refused before anything runs, the rest is right."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from vllm import CompletionOutput, RequestOutput, SamplingParams, logprobs
from vllm.exceptions import VLLMValidationError

from executor.engine.outputs import HOLD_SECONDS, Outputs
from executor.engine.sampling import checked
from executor.model.describe import sampling_parameters
from interpose.contract.result import Logprob, Result
from interpose.results.outcome import Outcome, take_event
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench
from tests.engine.harness import Block
from tests.engine.notebook import notebook

PROMPT = [5, 400, 17, 99, 256]
SCHEMA = {"enum": ["Paris", "Rome"]}
DOUBLING: dict[str, Any] = {}
for _ in range(60):  # it is small, and as text it would be longer than any memory
    DOUBLING = {"anyOf": [DOUBLING, DOUBLING]}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too many logprobs": ({"logprobs": 21}, "logprobs"),
    "too many prompt logprobs": ({"prompt_logprobs": 21}, "logprobs"),
    "no such constraint": ({"structured_outputs": {"choise": ["a"]}}, "choice"),
    "two constraints": ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "one of"),
    "not a dict": ({"structured_outputs": ["a"]}, "a dict"),
    "no choice": ({"structured_outputs": {"choice": []}}, "empty"),
    "not a grammar": ({"structured_outputs": {"grammar": "root ::= ("}}, "grammar"),
    "not a schema": ({"structured_outputs": {"json": "{"}}, "(?i)json|schema"),
    "a bias outside the vocabulary": ({"logit_bias": {100_000: 1.0}}, "vocab"),
    "a temperature below zero": ({"temperature": -1.0}, "temperature"),
    "tokens that are not whole": ({"max_tokens": 3.0}, "max_tokens"),
    "a seed that is not whole": ({"seed": 1.5}, "seed"),
    "a seed of more than 64 bits": ({"seed": 1 << 70}, "ints"),
    "a word for a switch": ({"ignore_eos": "yes"}, "ignore_eos"),
    "a bias by text": ({"logit_bias": {"a": 1.0}}, "logit_bias"),
    "too many parts": ({"stop_token_ids": [5] * 1_000_001}, "parts"),
    "too many characters": ({"stop": ["x" * 600_000] * 2}, "characters"),
    "lists in lists without end": ({"structured_outputs": {"json": DOUBLING}}, "parts"),
}


def judged(bench: Bench, sampling: dict[str, Any]) -> dict[str, Any]:
    return checked(sampling, bench.engine.llm.llm_engine.vllm_config, bench.engine.llm.get_tokenizer())


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_is_refused_before(bench: Bench, name: str) -> None:
    sampling, words = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=words):
        judged(bench, sampling)


def test_numbers_of_numpy_are_numbers(bench: Bench) -> None:
    made = judged(bench, {"max_tokens": np.int64(3), "temperature": np.float32(0.5)})
    assert made == {"max_tokens": 3, "temperature": 0.5} and type(made["max_tokens"]) is int


def test_parameters_that_are_more_than_numbers_are_the_engines_own(bench: Bench) -> None:
    made = judged(bench, {"repetition_detection": {"max_pattern_size": 1, "min_count": 3}, "max_tokens": 3})
    [ran] = bench.engine.run(Block(PROMPT, "token = model.samples.output.save()", made))
    assert ran.failure is None and ran.token_ids


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


async def test_logprobs_are_those_of_the_forward(bench: Bench) -> None:
    """They travel step by step, and are what the logits of the oracle say."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    [output] = bench.engine.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    completion = output.outputs[0]
    result = result_of(output)
    outcome = Outcome(results={0: Result()})
    outputs = Outputs(0, lambda event: take_event(outcome, pb.Event.FromString(event)), stream=True)
    for sent, stop in ((0, 1), (1, 3)):
        part = copy.copy(completion)
        part.token_ids, part.logprobs = completion.token_ids[sent:stop], completion.logprobs[sent:stop]
        part.text = completion.text if stop == 3 else ""
        of_prompt = [] if sent else output.prompt_logprobs
        outputs.add(RequestOutput("r", None, PROMPT, of_prompt, [part], stop == 3))
    take_event(outcome, pb.Event.FromString(outputs.last("length", 0)))
    assert outcome.results[0] == outputs.result() == result == Result.from_plain(result.to_plain())
    truth = bench.oracle.run(PROMPT, 3)
    assert result.logprobs is not None and result.prompt_logprobs is not None
    for step, token in enumerate(completion.token_ids):
        expected = truth.logits[step].reshape(-1).log_softmax(-1)
        assert len(result.logprobs[step]) == 2 and result.logprobs[step][token].rank == 1
        for i, one in result.logprobs[step].items():
            assert isinstance(one, Logprob) and abs(one.logprob - expected[i].item()) < 1e-3
    assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(PROMPT)
    assert all(place and token in place for place, token in zip(result.prompt_logprobs[1:], PROMPT[1:], strict=True))


@pytest.mark.parametrize("form", ["listed", "flat", "not decoded"])
def test_logprobs_in_each_form_that_vllm_has(form: str) -> None:
    """They are the same in a block and in the notebook: flat ones are as others, those of `detokenize=False` have no texts."""
    texts = {7: "a", 8: ""} if form != "not decoded" else {}
    place = {token: logprobs.Logprob(-0.5 * token, rank, texts.get(token)) for rank, token in enumerate((7, 8), 1)}
    places, of_prompt = (
        ([place], [None, place]) if form != "flat" else (logprobs.FlatLogprobs(), logprobs.FlatLogprobs())
    )
    if form == "flat":
        places.append(place)
        of_prompt.extend([None, place])
    completion = CompletionOutput(0, "a", [7], None, places)
    output = RequestOutput("r", None, [1, 2], of_prompt, [completion], True)
    outcome = Outcome(results={0: Result()})
    completion.finish_reason = "length"
    outputs = Outputs(0, lambda event: None, stream=False)
    outputs.add(output)
    take_event(outcome, pb.Event.FromString(outputs.last("length", 0)))
    expected = {7: Logprob(-3.5, 1, texts.get(7)), 8: Logprob(-4.0, 2, texts.get(8))}
    assert outcome.results[0] == outputs.result()
    assert outcome.results[0] == Result("a", [7], "length", [1, 2], [expected], [None, expected])


CHANCE = {"temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def offered(bench: Bench) -> dict[str, tuple[Any, dict[str, Any]]]:
    """For each parameter a value, and what it needs beside it to make a difference."""
    greedy = bench.engine.plain(PROMPT, max_tokens=8, ignore_eos=True)
    tokenizer = bench.engine.llm.get_tokenizer()
    middle = len(greedy.text) // 2
    part = greedy.text[middle : middle + 2]
    words = {number: tokenizer.decode([number]).lstrip() for number in range(50, 400)}
    word = next(one for one, text in words.items() if tokenizer.encode(text, add_special_tokens=False) == [one])
    ending = {"logit_bias": {tokenizer.eos_token_id: 100.0}}
    return {
        "presence_penalty": (2.0, {}),
        "frequency_penalty": (2.0, {}),
        "repetition_penalty": (2.0, {}),
        "temperature": (1.5, {"seed": 7}),
        "watermarking": (True, CHANCE),
        "top_p": (0.05, CHANCE),
        "top_k": (2, CHANCE),
        "min_p": (0.9, CHANCE),
        "seed": (8, CHANCE),
        "stop": ([part], {}),
        "stop_token_ids": ([greedy.token_ids[2]], {}),
        "ignore_eos": (False, ending),
        "max_tokens": (5, {}),
        "min_tokens": (4, {**ending, "ignore_eos": False}),
        "logprobs": (2, {}),
        "prompt_logprobs": (2, {}),
        "logprob_token_ids": ([3, 4], {}),
        "flat_logprobs": (True, {"logprobs": 2, "prompt_logprobs": 2}),
        "detokenize": (False, {"logprobs": 1}),
        "skip_special_tokens": (False, ending),
        "spaces_between_special_tokens": (False, {**ending, "skip_special_tokens": False}),
        "include_stop_str_in_output": (True, {"stop": [part]}),
        "structured_outputs": ({"choice": ["Paris", "Rome"]}, {"max_tokens": 60, "ignore_eos": False}),
        "logit_bias": ({77: 50.0}, {}),
        "allowed_token_ids": ([3, 4, 5, 6], {}),
        "bad_words": ([words[word]], {"logit_bias": {word: 50.0}}),
        "thinking_token_budget": (3, {}),
        "repetition_detection": ({"max_pattern_size": 1, "min_count": 3}, {"logit_bias": {77: 50.0}}),
        "trace_decode_token_ids": ([5, 6, 7], {}),
    }


# Another form of the same, or what these engines have no use for.
WITHOUT_DIFFERENCE = {"watermarking", "flat_logprobs", "spaces_between_special_tokens"}
# What an engine must be started for, and what vLLM says of one that was not.
FOR_OTHER_ENGINES = {"thinking_token_budget": "reasoning_config", "trace_decode_token_ids": "trace replay"}


def test_there_is_a_value_for_every_parameter(offered: dict[str, tuple[Any, dict[str, Any]]]) -> None:
    assert offered.keys() == set(sampling_parameters())


@pytest.mark.parametrize("name", sampling_parameters())
def test_a_parameter_is_the_engines_own(
    bench: Bench, offered: dict[str, tuple[Any, dict[str, Any]]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes by its name and with its value from the notebook to the engine, and does what it does to a plain request."""
    value, beside = offered[name]
    without = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **beside}
    asked = {**without, name: value}
    taken: list[SamplingParams] = []
    engine, model = bench.engine.llm.llm_engine, notebook(bench.engine)
    add = engine.add_request

    def keep(request_id: str, prompt: Any, params: SamplingParams, *args: Any, **kwargs: Any) -> Any:
        taken.append(copy.deepcopy(params))  # vLLM writes into it
        return add(request_id, prompt, params, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "add_request", keep)
        if name in FOR_OTHER_ENGINES:
            with pytest.raises(VLLMValidationError, match=FOR_OTHER_ENGINES[name]):
                with model.trace(PROMPT, **asked):
                    token = model.samples.output.save()
        else:
            with model.trace(PROMPT, **asked) as tracer:
                for _step in tracer.iter[:]:
                    model.logits.output
                inside = tracer.result.save()
    [params] = taken
    received = getattr(params, name)
    assert received == value or {key: getattr(received, key) for key in value} == value
    if name not in FOR_OTHER_ENGINES:
        assert inside == tracer.result
        assert alike(inside, plain(bench, asked))
        assert alike(inside, plain(bench, without)) == (name in WITHOUT_DIFFERENCE)


def plain(bench: Bench, sampling: dict[str, Any]) -> Result:
    """Return what a plain request generates."""
    params = SamplingParams(**judged(bench, sampling))
    [output] = bench.engine.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return result_of(output)


def result_of(output: RequestOutput) -> Result:
    """Return the result of a request whose output came at once."""
    outputs = Outputs(0, lambda event: None, stream=False)
    outputs.add(output)
    return outputs.result()


async def test_outputs_of_a_trace_that_does_not_stream_are_held() -> None:
    """The outputs of some time are one event; of a trace that streams, each output is one."""

    def outputs_of(count: int, stream: bool) -> tuple[list[pb.Output], Outputs]:
        sent: list[pb.Output] = []
        outputs = Outputs(3, lambda event: sent.append(pb.Event.FromString(event).output), stream)
        for number in range(count):
            outputs.add(
                RequestOutput("r", None, [1, 2], None, [CompletionOutput(0, "ab", [number], None, None)], False)
            )
        return sent, outputs

    held, first = outputs_of(3, stream=False)
    assert not held
    await asyncio.sleep(1.5 * HOLD_SECONDS)
    assert held == [pb.Output(invoke=3, text="ababab", token_ids=[0, 1, 2], prompt_token_ids=[1, 2])]
    assert pb.Event.FromString(first.last("stop", 1)).output == pb.Output(
        invoke=3, finished=True, finish_reason="stop", logs=1
    )
    each, second = outputs_of(2, stream=True)
    assert [list(one.token_ids) for one in each] == [[0], [1]] and not each[1].prompt_token_ids
    never, closed = outputs_of(2, stream=False)
    closed.close()
    await asyncio.sleep(1.5 * HOLD_SECONDS)
    assert not never and second.result().text == closed.result().text == "abab"


def alike(one: Result, other: Result) -> bool:
    """Whether two results say the same, the numbers of their logprobs to rounding."""
    fields, numbers = [asdict(one), asdict(other)], []
    for half in fields:
        places = [*(half["logprobs"] or ()), *filter(None, half["prompt_logprobs"] or ())]
        numbers.append([entry.pop("logprob") for place in places for entry in place.values()])
    return fields[0] == fields[1] and numbers[0] == pytest.approx(numbers[1], abs=1e-3)
