"""Without `with`: `model.generate` is its result, and what does nothing without a block says so."""

from __future__ import annotations

import asyncio
import gc
import linecache
import warnings

import pytest

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2
from tests.unit.interpose.conftest import finish


def sampling(trace):
    return {binding.name: binding.value.integer for binding in trace.sampling}


def test_a_statement_of_its_own_runs(service, model):
    model.generate("Hello", max_new_tokens=3)
    (trace,) = service.traces
    assert sampling(trace) == {"max_tokens": 3} and trace.invokes[0].prompt.text == "Hello"
    assert not trace.invokes[0].program.writes and trace.invokes[0].program.source == "pass\n"


def test_it_is_its_result_and_runs_once(service, model):
    result = model.generate("Hello", max_new_tokens=3, edits=["calm"])
    assert not service.traces
    assert result.text == " x" and result.token_ids == [7] and result.finish_reason == "length"
    assert result.result.prompt_token_ids == result.prompt_token_ids == [1, 2] and result.usage.prompt_tokens == 2
    assert repr(result) == repr(result.result) and result.logprobs is None and bool(result)
    assert len(service.traces) == 1 and service.traces[0].edits == ["calm"]
    assert model.generate("Hello").text == " x" and model.generate("Hello").usage.prompt_tokens == 2
    assert len(service.traces) == 3
    with pytest.raises(AttributeError):
        _ = result.txt
    with pytest.raises(interpose.InvalidArgument, match="one sequence"):
        _ = result[0]


def test_shown_as_a_notebook_shows_the_last_expression_it_runs(service, model):
    shown = []
    exec(compile("model.generate('Hello')\n", "<cell>", "single"), {"model": model, "__builtins__": {"print": print}})
    assert len(service.traces) == 1
    shown.append(repr(model.generate("Hello")))
    assert shown == [repr(interpose.Result(" x", [7], "length", [1, 2]))]


def test_with_a_block_it_is_a_trace(service, model):
    with model.generate("Hello", max_new_tokens=3) as tracer:
        x = [1].save()
    later = model.generate("Hello", max_new_tokens=4)
    with later as tracer:
        x = [1].save()
    assert [sampling(trace) for trace in service.traces] == [{"max_tokens": 3}, {"max_tokens": 4}], x
    assert tracer.result.text == " x" and "x = [1].save()" in service.traces[1].invokes[0].program.source


def test_several_sequences_are_a_list(service, model):
    results = model.generate("Hello", n=2, temperature=1.0)
    assert [one.text for one in results] == [" x", " x"] and len(results) == 2 and results[1].token_ids == [7]
    with pytest.raises(interpose.InvalidArgument, match=r"2 sequences: write \[0\]\.text"):
        _ = results.text
    assert len(service.traces) == 1


def test_its_failure_is_raised(service, model):
    def script(service, trace):
        yield from finish(service, trace)
        raise ServiceFailure(failure(trace_pb2.ERROR_CODE_UNAVAILABLE, "gone"))

    service.script = script
    with pytest.raises(interpose.Unavailable, match="gone"):
        model.generate("Hello")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"stream": True}, "stream=True"), ({"blocking": False}, "blocking=False"), ({"prompt": None}, "takes a prompt")],
)
def test_what_needs_a_block_says_so(service, model, options, message):
    with pytest.raises(interpose.InvalidArgument, match=message):
        model.generate(**{"prompt": "Hello", **options})
    assert not service.traces


def test_a_trace_that_is_a_statement_is_refused_at_its_line(service, model):
    with pytest.raises(interpose.InvalidArgument, match=r"with model\.trace.*model\.generate\(prompt") as caught:
        model.trace("Hello", max_tokens=3)
    assert caught.value.frames[0].text.strip() == 'model.trace("Hello", max_tokens=3)'
    with pytest.raises(interpose.InvalidArgument, match=r"with model\.scan\(prompt\)"):
        model.scan("Hello")
    with pytest.raises(interpose.InvalidArgument, match=r"with model\.edit"):
        model.edit("calm")
    with pytest.raises(interpose.InvalidArgument, match=r"with tracer\.invoke\(prompt\)") as caught:
        with model.trace() as tracer:
            tracer.invoke("Hello")
    assert caught.value.frames[0].text.strip() == 'tracer.invoke("Hello")'
    assert not service.traces and not service.edits
    assert "write `with model.trace" in repr(model.trace("Hello"))


def test_what_is_never_used_is_warned_about_at_its_line(service, model):
    def made():
        return model.generate("Hello"), model.trace("Hello")

    def drop():
        made()
        gc.collect()

    with pytest.warns(interpose.InterposeWarning) as caught:
        drop()
    assert {warning.filename for warning in caught} == {__file__} and not service.traces
    texts = sorted(str(warning.message) for warning in caught)
    assert len(texts) == 2 and "read its .text or .token_ids" in texts[0] and "with model.trace" in texts[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, trace = made()
        assert result.text == " x"
        with trace:
            pass
        del result, trace
        gc.collect()


def test_on_an_event_loop_it_is_awaited(service):
    async def run():
        async with await interpose.connect_async(service.address, progress=False) as client:
            model = await client.model()
            result = await model.generate("Hello", max_new_tokens=3)
            await model.generate("Hello")
            later = model.generate("Hello")
            with pytest.raises(interpose.InvalidArgument, match=r"result = await model\.generate"):
                _ = later.text
            assert (await later).text == later.text == " x"
            with pytest.raises(interpose.InvalidArgument, match=r"result = await model\.generate"):
                model.generate("Hello")
            async with model.generate("Hello", max_new_tokens=5):
                pass
            return result

    result = asyncio.run(run())
    assert isinstance(result, interpose.Result) and result.text == " x"
    assert [sampling(trace).get("max_tokens") for trace in service.traces] == [3, None, None, 5]


def test_the_same_name_in_several_prompts_is_warned_about_at_its_line(service, model):
    def script(service, trace):
        for index in range(len(trace.invokes)):
            yield service.saves(index, hidden=index)

    service.script = script

    def trace():
        with model.trace() as tracer:
            for prompt in ("a", "b"):
                with tracer.invoke(prompt):
                    hidden = model.logits.output.save()
        return hidden

    remedy = r"'hidden' was saved by 2 prompts .* hiddens = \[\]\.save\(\)"
    with pytest.warns(interpose.InterposeWarning, match=remedy) as caught:
        assert trace() == 1
    (warning,) = caught
    assert linecache.getline(warning.filename, warning.lineno).strip() == "hidden = model.logits.output.save()"


def test_names_of_their_own_and_names_that_are_carried_on_are_no_reason_to_warn(service, model):
    def script(service, trace):
        names = [set(invoke.program.writes) for invoke in trace.invokes]
        for index, mine in enumerate(names):
            yield service.saves(index, **dict.fromkeys(mine, index))

    service.script = script
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.trace() as tracer:
            with tracer.invoke("a"):
                one = model.logits.output.save()
            with tracer.invoke("b"):
                two = model.logits.output.save()
        with model.trace() as tracer:
            with tracer.invoke("a"):
                count = [1].save()
            with tracer.invoke("b"):
                count = [*count, 2].save()
        with model.trace("a", n=2, temperature=1.0):
            one = model.logits.output.save()
    assert (two, count) == (1, 1) and one == [0, 1]


def test_a_function_that_traces_may_be_a_statement(service, model):
    def traced(prompt):
        with model.trace(prompt):
            pass
        return model.generate(prompt).text

    traced("Hello")
    assert len(service.traces) == 2
