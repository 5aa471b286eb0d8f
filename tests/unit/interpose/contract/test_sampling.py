"""Sampling parameters in the notebook: n sequences of a prompt, structured outputs, logprobs in the result."""

from __future__ import annotations

import pytest

import interpose
from interpose import Logprob
from interpose.contract.sampling import check_sampling, sequences
from interpose.v1 import trace_pb2 as pb
from tests.unit.interpose.conftest import finish
from tests.unit.interpose.results.test_streaming import Increments, output


def samplings(service) -> list[dict[str, float]]:
    return [{b.name: b.value.integer for b in invoke.sampling} for invoke in service.traces[-1].invokes]


def in_order(service, trace):
    for index in range(len(trace.invokes)):
        yield service.saves(index, x=index, **({"odd": index} if index % 2 else {}))
        yield output("abcdef"[index], index, index, finished=True)


def test_n_sequences_are_n_invokes_and_each_name_has_a_value_of_each(service, model):
    service.script = in_order
    with model.trace("Hello", n=3, seed=5, max_tokens=1) as tracer:
        x = odd = 0
    trace = service.traces[0]
    assert samplings(service) == [{"seed": 5}, {"seed": 6}, {"seed": 7}]
    assert {b.name for b in trace.sampling} == {"seed", "max_tokens"}
    assert all(invoke.prompt.text == "Hello" and not invoke.after for invoke in trace.invokes)
    assert x == [0, 1, 2] and odd == [None, 1, None]
    assert [one.text for one in tracer.result] == ["a", "b", "c"]


def test_prompts_with_and_without_sequences(service, model):
    service.script = in_order
    model.limits.max_invokes = 5
    with model.trace(n=2) as tracer:
        with tracer.invoke("a") as first:
            x = 0
        with tracer.invoke("b", n=1) as second:
            x = 0
        with tracer.invoke("c", n=2, seed=1) as third:
            x = 0
    assert [invoke.prompt.text for invoke in service.traces[0].invokes] == ["a", "a", "b", "c", "c"]
    assert samplings(service) == [{}, {}, {}, {"seed": 1}, {"seed": 2}]
    assert x == [3, 4] and second.result.text == "c"
    assert [one.text for one in first.result] == ["a", "b"] and [one.text for one in third.result] == ["d", "e"]


def test_sequences_do_not_see_each_others_names(service, model):
    x = 5
    with model.trace("Hello", n=2):
        x = x + 1
    assert all(not invoke.after for invoke in service.traces[0].invokes)
    with pytest.raises(interpose.InvalidArgument, match="'x' has a value for each of the n sequences") as caught:
        with model.trace() as tracer:
            with tracer.invoke("a", n=2):
                x = 1
            with tracer.invoke("b"):
                y = x + 1
    assert caught.value.frames[0].text.strip() == "y = x + 1"


def test_an_error_in_one_sequence(service, model):
    def script(service, trace):
        yield service.saves(0, x=1)
        yield pb.Event(failed=pb.Failure(code=pb.ERROR_CODE_INTERVENTION, message="ValueError: boom", invoke=1))
        yield from finish(service, trace)

    service.script = script
    with pytest.raises(interpose.InterventionError, match="boom") as caught:
        with model.trace("Hello", n=2):
            x = 0
    assert caught.value.invoke == 0 and x == [1, None]


def test_sequences_of_a_stream(service, model):
    def script(service, trace):
        for index in (1, 0):
            yield Increments(service, index)(x=index)
            yield output("ab"[index], 1, index, finished=True)

    service.script = script
    with model.trace("Hello", n=2, stream=True) as tracer:
        x = 0
    assert [(out.invoke, out.sequence, out.saves["x"]) for out in tracer.stream()] == [(0, 1, 1), (0, 0, 0)]
    assert x == [0, 1]


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "2", None])
def test_n_is_a_count(model, n):
    with pytest.raises(interpose.InvalidArgument, match="number of sequences"):
        model.trace("Hello", n=n)


def test_sequences_without_chance_are_refused(service, model):
    with pytest.raises(interpose.InvalidArgument, match="all the same"):
        with model.trace("Hello", n=2, temperature=0.0):
            x = 0
    assert sequences({"temperature": 0}, {"n": 1}) == [{}]
    assert sequences({"temperature": 0, "n": 2}, {"temperature": 1.0}) == [{"temperature": 1.0}] * 2


def test_sequences_of_a_job_are_refused(service, model):
    with pytest.raises(interpose.InvalidArgument, match="background job takes one sequence"):
        with model.trace("Hello", n=2, blocking=False):
            x = 0


def test_more_sequences_than_invokes_are_refused(service, model):
    with pytest.raises(interpose.InvalidArgument, match="4 invokes"):
        with model.trace("Hello", n=5):
            x = 0


STRUCTURED = [
    ("yes", "a dict with one constraint"),
    ({}, "takes one of"),
    ({"choice": ["a"], "regex": "b"}, "takes one of .* here are 2"),
    ({"choise": ["a"]}, "did you mean choice"),
    ({"choice": "a"}, "a list of strings"),
    ({"choice": ["a", 1]}, "a list of strings"),
    ({"json": 3}, "a JSON schema"),
    ({"regex": 3}, "a regular expression"),
    ({"choice": ["a"], "disable_any_whitespace": "x"}, "True or False"),
]


@pytest.mark.parametrize(("structured", "words"), STRUCTURED)
def test_structured_outputs_that_are_none(structured, words):
    with pytest.raises(interpose.InvalidArgument, match=words):
        check_sampling({"structured_outputs": structured}, [])


def test_structured_outputs_that_are_taken():
    for structured in ({"choice": ["a"]}, {"json": {"type": "object"}}, {"regex": "a", "whitespace_pattern": " "}):
        assert check_sampling({"structured_outputs": structured}, []) == {"structured_outputs": structured}


def test_lora_says_what_there_is(model):
    with pytest.raises(interpose.InvalidArgument, match="no LoRA adapters"):
        model.trace("Hello", lora="mine")


def test_lora_goes_by_name_for_a_trace_and_for_each_prompt(service, client):
    service.adapters = ["calm", "formal"]
    model = client.model()
    assert model.adapters == ["calm", "formal"]
    with model.trace(lora="calm", max_tokens=2) as tracer:
        with tracer.invoke("a", lora="formal", max_tokens=3):
            pass
        with tracer.invoke("b"):
            pass
        with tracer.invoke("c", lora=None):
            pass
    trace = service.traces[0]
    assert not trace.lora and [invoke.lora for invoke in trace.invokes] == ["formal", "calm", ""]
    assert [binding.name for binding in trace.invokes[0].sampling] == ["max_tokens"]
    with model.trace("Hello", lora="calm"):
        pass
    assert service.traces[1].lora == "calm"
    for wrong in ("clam", 3):
        with pytest.raises(interpose.InvalidArgument, match="there is no LoRA adapter") as caught:
            model.trace("Hello", lora=wrong)
    with pytest.raises(interpose.InvalidArgument, match="did you mean formal") as caught:
        with model.trace() as tracer:
            with tracer.invoke("a", lora="formel"):
                pass
    assert caught.value.suggestions == ("formal",)
    with pytest.raises(interpose.InvalidArgument, match="has no sampling parameter"):
        model.trace("Hello", lor="calm")


def test_logprobs_arrive_in_the_result(service, model):
    def place(*entries: tuple[int, float, int, str]) -> pb.TokenLogprobs:
        ids, logprobs, ranks, texts = zip(*entries, strict=True)
        return pb.TokenLogprobs(token_ids=ids, logprobs=logprobs, ranks=ranks, texts=texts)

    def script(service, trace):
        first = output("a", 7)
        first.output.logprobs.append(place((7, -0.5, 1, "a"), (8, float("-inf"), 0, "")))
        first.output.prompt_logprobs.extend([pb.TokenLogprobs(), place((2, -1.0, 3, "x"))])
        yield first
        last = output("b", 8, finished=True)
        last.output.logprobs.append(pb.TokenLogprobs(token_ids=[8], logprobs=[-0.25], ranks=[1]))  # detokenize=False
        yield last

    service.script = script
    with model.trace("Hello", stream=True) as tracer:
        x = 0
    assert [len(out.logprobs) for out in tracer.stream()] == [1, 2]
    assert tracer.result.logprobs == [
        {7: Logprob(-0.5, 1, "a"), 8: Logprob(float("-inf"), None, "")},
        {8: Logprob(-0.25, 1, None)},
    ]
    assert tracer.result.prompt_logprobs == [None, {2: Logprob(-1.0, 3, "x")}]
    service.script = finish
    with model.trace("Hello") as tracer:
        x = 0
    assert tracer.result.logprobs is None and tracer.result.prompt_logprobs is None
