"""What users of other tools write: the error says what to write here."""

from __future__ import annotations

import pytest

import interpose
from interpose.contract.sampling import check_sampling

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
