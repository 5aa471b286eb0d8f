"""The tokens that a trace may need are never fewer than those that it uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from interpose.cli.demo_model import write_demo_model
from interpose.v1 import model_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Value
from serve_app.tenants.tokens import tokens_of

DESCRIPTION = model_pb2.ModelDescription(max_model_len=512)


def trace(*invokes: pb.Invoke, **sampling: Value) -> pb.Trace:
    made = pb.Trace(invokes=invokes)
    for name, value in sampling.items():
        made.sampling.add(name=name).value.CopyFrom(value)
    return made


def ids(count: int, **sampling: Value) -> pb.Invoke:
    invoke = pb.Invoke(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[1] * count)))
    for name, value in sampling.items():
        invoke.sampling.add(name=name).value.CopyFrom(value)
    return invoke


def test_prompts_and_what_may_be_generated() -> None:
    assert tokens_of(trace(ids(3)), DESCRIPTION) == 4, "one token is generated unless more are asked for"
    assert tokens_of(trace(ids(3), ids(5), max_tokens=Value(integer=10)), DESCRIPTION) == 28
    assert (
        tokens_of(trace(ids(3, max_tokens=Value(integer=2)), ids(5), max_tokens=Value(integer=10)), DESCRIPTION) == 20
    )
    assert tokens_of(trace(ids(3), pb.Invoke(joint=True)), DESCRIPTION) == 4


@pytest.mark.parametrize("limit", [Value(integer=10_000), Value(none=Value().none), Value(text="many")])
def test_a_prompt_counts_with_no_more_than_the_model_takes(limit: Value) -> None:
    assert tokens_of(trace(ids(3), max_tokens=limit), DESCRIPTION) == 512


def test_a_negative_number_of_tokens_gives_nothing_back() -> None:
    assert tokens_of(trace(ids(3), max_tokens=Value(integer=-50)), DESCRIPTION) == 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    return AutoTokenizer.from_pretrained(write_demo_model(tmp_path_factory.mktemp("model") / "llama", "llama"))


@given(text=st.text(max_size=80))
def test_a_text_has_no_more_tokens_than_it_counts_with(tokenizer: object, text: str) -> None:
    counted = tokens_of(trace(pb.Invoke(prompt=pb.Prompt(text=text))), DESCRIPTION)
    assert len(tokenizer.encode(text)) + 1 <= counted  # type: ignore[attr-defined]
