"""What a request may ask of the engine beside its block: chats, sequences, logprobs, structured outputs."""

from __future__ import annotations

import json

import pytest
import torch

import interpose
from interpose.v1 import trace_pb2 as pb
from interpose.v1 import value_pb2
from tests.e2e.service import RunningService
from tests.e2e.test_calls import trace

PROMPT = "The Eiffel Tower is in"


def test_a_chat_goes_through_the_models_template(model: interpose.Model) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the tower?"}]
    with model.trace(messages, max_tokens=2, temperature=0.0) as tracer:
        hidden = model.model.layers[0].output[0].save()
    text = "system: Be brief.\nuser: Where is the tower?\nassistant:"
    ids = tracer.result.prompt_token_ids
    assert model.tokenizer.decode(ids, skip_special_tokens=True) == text and hidden.shape[0] == len(ids)
    with model.trace(ids, max_tokens=2, temperature=0.0) as again:
        same = model.model.layers[0].output[0].save()
    assert torch.equal(hidden, same) and again.result.token_ids == tracer.result.token_ids


def test_without_a_block(model: interpose.Model) -> None:
    """`model.generate` without `with` is its result."""
    result = model.generate(PROMPT, max_new_tokens=3, temperature=0.0, ignore_eos=True)
    with model.trace(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
        token = model.samples.output.item().save()
    assert len(result.token_ids) == 3 and result.token_ids[0] == token
    assert (result.text, result.token_ids) == (tracer.result.text, tracer.result.token_ids)


def test_sequences(model: interpose.Model) -> None:
    """Each of n sequences has a block of its own, and is what a trace with its seed gives alone."""
    with model.trace(PROMPT, n=3, seed=11, temperature=1.0, max_tokens=4, ignore_eos=True) as tracer:
        tokens, logits = [].save(), [].save()
        for _step in tracer.iter[:]:
            logits.append(model.logits.output)
            tokens.append(model.samples.output.item())
        done = tracer.result.save()
    assert len(tokens) == len(logits) == len(tracer.result) == 3
    assert len({tuple(one) for one in tokens}) > 1
    for number in range(3):
        assert tokens[number] == tracer.result[number].token_ids == done[number].token_ids
        with model.trace(PROMPT, seed=11 + number, temperature=1.0, max_tokens=4, ignore_eos=True) as one:
            alone = [].save()
            for _step in one.iter[:]:
                alone.append(model.logits.output)
        assert one.result.token_ids == tokens[number]
        for mine, other in zip(logits[number], alone, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_logprobs(model: interpose.Model) -> None:
    with model.trace(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1) as tracer:
        logits = [].save()
        for _step in tracer.iter[:]:
            logits.append(model.logits.output)
        inside = tracer.result.save()
    result = tracer.result
    assert inside.logprobs == result.logprobs and inside.prompt_logprobs == result.prompt_logprobs
    for place, token, row in zip(result.logprobs, result.token_ids, logits, strict=True):
        assert len(place) == 2 and place[token].rank == 1
        assert place[token].logprob == pytest.approx(row[0].log_softmax(-1)[token].item(), abs=1e-3)
    assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == len(result.prompt_token_ids)


def test_structured_outputs(model: interpose.Model) -> None:
    with model.trace(max_tokens=40, temperature=0.0) as tracer:
        with tracer.invoke(PROMPT, structured_outputs={"choice": ["Paris", "Rome"]}) as choice:
            allowed = (model.logits.output > -1e9).sum().item().save()
        with tracer.invoke(PROMPT, structured_outputs={"regex": "[ab]{3}"}) as regex:
            pass
        with tracer.invoke(PROMPT, structured_outputs={"json": {"enum": ["Paris", "Rome"]}}) as structured:
            pass
    assert choice.result.text in ("Paris", "Rome") and 0 < allowed < 20
    assert set(regex.result.text) <= {"a", "b"} and len(regex.result.text) == 3
    assert json.loads(structured.result.text) in ("Paris", "Rome")


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"logprobs": 1000}, "logprobs"),
        ({"max_tokens": 3.0}, "max_tokens"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "grammar"),
        ({"structured_outputs": {"choice": []}}, "empty"),
        ({"n": 2, "temperature": 0.0}, "all the same"),
        ({"lora": "mine"}, "no LoRA adapters"),
    ],
)
def test_what_the_engine_would_refuse(model: interpose.Model, sampling: dict[str, object], words: str) -> None:
    with pytest.raises(interpose.InvalidArgument, match=words):
        with model.trace(PROMPT, **sampling):
            hidden = model.model.layers[0].output[0].save()


def test_sequences_are_the_clients_own(service: RunningService, session: str) -> None:
    """A message with `n` in it is refused: who speaks the protocol sends one invoke for each sequence."""
    asked = trace(n=2)
    with pytest.raises(Exception, match="unknown sampling parameter 'n'"):
        service.submit(asked, session)
    asked = trace()
    asked.invokes[0].sampling.append(value_pb2.Binding(name="structured_outputs", value=value_pb2.Value(text="x")))
    with pytest.raises(Exception, match="a dict with one constraint") as caught:
        service.submit(asked, session)
    assert caught.value.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT  # type: ignore[attr-defined]
