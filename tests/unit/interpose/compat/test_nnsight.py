"""nnsight's names over a served model: arguments that are renamed, left out, or refused."""

from __future__ import annotations

import pytest

import interpose
from interpose.compat import nnsight
from interpose.compat.nnsight import VLLM, LanguageModel, sampling_of


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"remote": True, "scan": True, "validate": False}, {}),
        ({"max_new_tokens": 3, "do_sample": False}, {"max_tokens": 3, "temperature": 0.0}),
        ({"do_sample": True, "top_p": 0.5}, {"top_p": 0.5}),
        ({"num_return_sequences": 2}, {"n": 2}),
        ({"eos_token_id": 7}, {"stop_token_ids": [7]}),
        ({"eos_token_id": [7, 8], "stream": True}, {"stop_token_ids": [7, 8], "stream": True}),
    ],
)
def test_arguments_get_their_names(options, sampling):
    assert sampling_of(options) == sampling


def test_two_arguments_that_say_the_same_are_refused():
    with pytest.raises(interpose.InvalidArgument, match="two arguments set max_tokens"):
        sampling_of({"max_tokens": 2, "max_new_tokens": 3})


def test_a_block_runs_as_it_is_written_for_nnsight(service, model):
    served = LanguageModel(model)
    with served.trace("Hello", remote=True) as tracer:
        hidden = nnsight.save(served.model.layers[1].output[0])
    (trace,) = service.traces
    assert {b.name: b.value.integer for b in trace.sampling} == {"max_tokens": 1}
    reads = {binding.name: binding.value for binding in trace.invokes[0].program.reads}
    assert reads["served"].module == "" and list(trace.invokes[0].program.writes) == ["hidden"]
    assert tracer.result.text == " x"


def test_generations_and_vllms_traces(service, model):
    with LanguageModel(model).generate("Hello", max_new_tokens=3, do_sample=False) as tracer:
        pass
    served = VLLM(model)
    with served.trace("Hello", max_tokens=2, temperature=0.0, remote=True) as tracer:
        pass
    with served.trace("Hello") as tracer:
        pass
    sampling = [{b.name: b.value.integer or b.value.real for b in trace.sampling} for trace in service.traces]
    assert sampling == [{"max_tokens": 3, "temperature": 0.0}, {"max_tokens": 2, "temperature": 0.0}, {}]


def test_a_name_with_an_organisation_is_the_served_model(service, client):
    assert LanguageModel("meta-llama/tiny-llama", client=client, device_map="auto", dispatch=True).name == "tiny-llama"
    assert LanguageModel("tiny-llama", client=client).name == "tiny-llama"
    with pytest.raises(interpose.NotFound, match="no model 'org/other'"):
        LanguageModel("org/other", client=client)


def test_sessions(service, client):
    served = LanguageModel("tiny-llama", client=client)
    with nnsight.session(served) as s:
        assert s.id in service.sessions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"model.layers": "layers"}}, r"takes no 'rename': .*model\.blocks"),
        ({"torch_dtype": "float16"}, "takes no 'torch_dtype': the model is where it is served"),
    ],
)
def test_what_a_served_model_does_not_take(model, options, message):
    with pytest.raises(interpose.InvalidArgument, match=message):
        LanguageModel(model, **options)


def test_edits_have_names(model):
    with pytest.raises(interpose.InvalidArgument, match="an edit has a name"):
        LanguageModel(model).edit()
