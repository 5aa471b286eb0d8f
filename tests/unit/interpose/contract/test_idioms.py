"""What users of other tools write: the error says what to write here."""

from __future__ import annotations

import pytest

import interpose
from interpose.contract.errors import failure, from_failure
from interpose.contract.idioms import OF_CLIENTS, OF_MODELS, OF_PACKAGE
from interpose.contract.sampling import check_sampling
from interpose.v1 import trace_pb2

KNOWN = ["max_tokens", "temperature", "top_p", "top_k", "seed", "bad_words", "allowed_token_ids", "skip_special_tokens"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("edits", r"belongs to the whole trace: model\.trace\(…, edits="),
        ("remote", "leave it out"),
        ("scan", r"with model\.scan\(prompt\)"),
        ("validate", "leave validate out"),
        ("do_sample", "temperature=0.0"),
        ("num_return_sequences", "is n here"),
        ("names_filter", r"tracer\.cache\(modules="),
        ("output_hidden_states", "resid_post"),
    ],
)
def test_arguments_of_other_tools(name, message):
    with pytest.raises(interpose.InvalidArgument, match=message):
        check_sampling({name: True}, KNOWN)


def test_an_unknown_parameter_is_answered_with_the_common_ones():
    with pytest.raises(interpose.InvalidArgument, match=r"it has max_tokens, temperature, .* SamplingParams") as caught:
        check_sampling({"qqq": 1}, KNOWN)
    assert "allowed_token_ids" not in caught.value.message


def test_the_same_in_a_trace_and_an_invoke(service, model):
    with pytest.raises(interpose.InvalidArgument, match="leave it out"), model.trace("Hello", remote=True):
        pass
    with pytest.raises(interpose.InvalidArgument, match="belongs to the whole trace"), model.trace() as tracer:
        with tracer.invoke("Hello", edits=["calm"]):
            pass
    with pytest.raises(interpose.InvalidArgument, match=r"with model\.scan"):
        model.generate("Hello", scan=True)
    assert not service.traces


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda model: model.run_with_cache("Hello"), r"tracer\.cache\(\)"),
        (lambda model: model.run_with_hooks("Hello"), "write the change in a block"),
        (lambda model: model.lm_head.register_forward_hook(print), "write the change in a block"),
        (lambda model: model.requires_grad_(False), "no gradient goes through"),
        (lambda model: model.model.layers[1].requires_grad_(), "no gradient goes through"),
        (lambda model: model.state_dict(), r"model\.lm_head\.weight"),
        (lambda model: model.to("cuda"), "leave this out"),
        (lambda model: model.W_U, r"print\(model\)"),
        (lambda model: model.session(), r"with client\.session"),
        (lambda model: setattr(model, "logits", 0), r"model\.logits\.output = …"),
        (lambda model: model.model.layers[1].hook_resid_post, r"the value is model\.blocks\[i\]\.resid_post"),
        (lambda model: model.model.layers[1].mlp.hook_pre, r"blocks\[i\]\.mlp\.gate or model\.blocks\[i\]\.mlp\.up"),
        (lambda model: model.model.layers[1].hook_mlp_out, r"the value is model\.blocks\[i\]\.mlp_out"),
        (lambda model: model.hook_unknown, r"print\(model\.blocks\)"),
        (lambda model: model.ln_final, "model.final_norm"),
        (lambda model: model.iter, "tracer.iter"),
        (lambda model: model.model.layers[1].source, "operations inside a module"),
        (lambda model: model.edit(), "an edit has a name"),
        (lambda model: model.edit("calm", inplace=True), r"edits=\[name\]"),
        (lambda model: model.edit("calm", other=True), "takes no 'other'\nRemedies: "),
    ],
)
def test_attributes_of_other_models(model, use, message):
    with pytest.raises(interpose.InterposeError, match=message):
        use(model)


def test_in_a_block_they_are_refused_at_their_line(service, model):
    with pytest.raises(interpose.UnknownLocation, match=r"tracer\.cache\(\)") as caught, model.trace("Hello"):
        logits, cache = model.run_with_cache("Hello")
    assert caught.value.frames[0].text.strip() == 'logits, cache = model.run_with_cache("Hello")'
    with pytest.raises(interpose.UnknownLocation, match=r"tracer\.result"), model.trace("Hello") as tracer:
        text = tracer.output
    assert not service.traces, (logits, cache, text)


def test_attributes_of_other_results():
    result = interpose.Result("x", [7])
    for name in ("outputs", "sequences", "choices"):
        with pytest.raises(AttributeError, match=r"result\.text, result\.token_ids"):
            getattr(result, name)
    with pytest.raises(AttributeError, match=r"model\.logits\.output\.save\(\)"):
        _ = result.logits
    with pytest.raises(AttributeError, match="no attribute 'txt'$"):
        _ = result.txt
    assert not hasattr(result, "__array__")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda client: interpose.LanguageModel("gpt2"), r"client\.model\(name\)"),
        (lambda client: interpose.HookedTransformer, "HookedModel"),
        (lambda client: interpose.IntervenableModel, "a server has the model"),
        (lambda client: interpose.session(), r"with client\.session\(\)"),
        (lambda client: interpose.list(), r"\[\]\.save\(\)"),
        (lambda client: interpose.nothing, "no attribute 'nothing'$"),
        (lambda client: client.trace("Hello"), r"client\.model\(\)\.trace\(prompt\)"),
        (lambda client: client.nothing, "no attribute 'nothing'$"),
        (lambda client: client.session().trace("Hello"), r"with model\.trace\(prompt\)"),
        (lambda client: client.session().iter, "a Python loop"),
        (lambda client: client.model().edit.__self__.trace().value, "values are saved, not the tracer"),
    ],
)
@pytest.mark.filterwarnings("ignore:this did nothing")
def test_attributes_of_other_packages(client, use, message):
    with pytest.raises(AttributeError, match=message):
        use(client)


def test_an_attribute_of_other_tools_values():
    message = "AttributeError: 'Tensor' object has no attribute 'value'"
    error = from_failure(failure(trace_pb2.ERROR_CODE_INTERVENTION, message))
    assert error.message == f"{message}; a value in a block is the tensor itself; leave .value out"
    other = from_failure(failure(trace_pb2.ERROR_CODE_INTERVENTION, message.replace("'value'", "'valeu'")))
    assert other.message.endswith("'valeu'")


def test_hints_are_about_names_that_there_are_not(client, model):
    for name in OF_CLIENTS:
        assert not hasattr(client, name)
    for name in set(OF_MODELS) - {"session"}:
        assert not hasattr(model, name), name
    assert not set(OF_PACKAGE) & set(interpose.__all__)
