"""Questions of the form `model.serves("blocks[3].attn.q")`: the answer, the reason, and hostile texts."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import interpose
from interpose.modules.serves import Verdict, verdict
from interpose.modules.tree import Node, tree_of
from interpose.v1 import model_pb2

WHY = "this architecture runs attention and MLP in parallel"
NEVER = "lm_head is never called in the forward pass"


def described() -> Node:
    found = model_pb2.ModelDescription(name="tiny", class_name="LlamaForCausalLM")
    found.modules.add(path="", class_name="LlamaForCausalLM", output_refused="the model is not called")
    found.modules.add(path="model", class_name="LlamaModel")
    found.modules.add(path="model.layers", class_name="ModuleList", output_refused="no call", input_refused="no call")
    for i in range(2):
        layer = found.modules.add(path=f"model.layers.{i}", class_name="LlamaDecoderLayer")
        layer.parameters.add(name="weight", shape=[2], dtype=1)
    found.modules.add(path="lm_head", class_name="ParallelLMHead", output_refused=NEVER, input_refused=NEVER)
    found.canonical.add(path="blocks", title="Blocks")
    for i in range(2):
        block = found.canonical.add(path=f"blocks.{i}", title="Block")
        block.values.add(name="resid_pre", shape="[tokens, 8]")
        block.values.add(name="resid_mid", refusal=WHY)
        found.canonical.add(path=f"blocks.{i}.attn", title="Attention").values.add(name="q", shape="[tokens, 2, 4]")
    return tree_of(found)


TREE = described()


@pytest.mark.parametrize(
    ("location", "shape"),
    [
        ("blocks[1].attn.q", "[tokens, 2, 4]"),
        ("model.blocks[-1].attn.q", "[tokens, 2, 4]"),
        ("blocks.1.attn.q", "[tokens, 2, 4]"),
        ("blocks[0].resid_pre", "[tokens, 8]"),
        ("model.layers[1].output", ""),
        ("model.model.layers[1].output", ""),
        ("model.layers.1.inputs", ""),
        ("model.layers[0].weight", ""),
        ("logits.output", ""),
        ("model.samples.output", ""),
    ],
)
def test_what_is_served(location: str, shape: str) -> None:
    found = verdict(TREE, location)
    assert found and found.reason == "" and found == Verdict(location, shape=shape)


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("blocks[0].resid_mid", WHY),
        ("model.blocks[0].resid_mid", WHY),
        ("lm_head.output", NEVER),
        ("lm_head.inputs", NEVER),
        ("output", "the model is not called"),
        ("model.layers.output", "no call"),
        ("logits.input", "logits has an output only; read logits.output"),
        ("blocks[2].attn.q", "blocks[2] does not exist: blocks has 2 modules, 0 to 1"),
        ("model.blocks[0].attn.nothing", "has no value 'nothing'"),
        ("model.layers[0].attention.output", "has no module 'attention'"),
        ("blocks[0].attn", "write model.blocks[0].attn.q"),
        ("model.layers[0]", "write model.model.layers[0].output"),
        ("elsewhere.output", "has no module 'elsewhere'"),
    ],
)
def test_what_is_refused(location: str, reason: str) -> None:
    found = verdict(TREE, location)
    assert not found and reason in found.reason and found.location == location
    assert repr(found).startswith(f"{location}: refused: ")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            ".",
            "[",
            "a.",
            "a..b",
            "a[",
            "a[]",
            "a[x]",
            "a[1",
            "a[1.5]",
            "a b",
            "a\n",
            "blocks[0].attn.q ",
            "ä",
        ),
        *(
            "a[1]b",
            ".a",
            "[0]",
            "blocks[0].next().attn.q",
            "__import__('os')",
            "a" * 501,
            "a[" + "9" * 40 + "]",
            "a.0x",
        ),
        *("blocks[0].attn.q[0]", "model.layers[0].output.shape", "blocks[0].attn.q.q"),
    ],
)
def test_texts_that_are_no_location(text: str) -> None:
    with pytest.raises(interpose.InvalidArgument):
        verdict(TREE, text)


@pytest.mark.parametrize("value", [None, 3, b"blocks", ["blocks"], TREE])
def test_values_that_are_no_text(value: object) -> None:
    with pytest.raises(interpose.InvalidArgument, match="a location is a str"):
        verdict(TREE, value)


@given(st.one_of(st.text(max_size=40), st.text("modelblcks.[]0123-9attnq", max_size=40)))
def test_any_text_gets_a_verdict_or_a_typed_error(text: str) -> None:
    with contextlib.suppress(interpose.InvalidArgument):
        assert isinstance(verdict(TREE, text), Verdict)


def test_a_server_that_says_nothing_of_refusals_serves_its_modules() -> None:
    found = model_pb2.ModelDescription(name="tiny", class_name="Model")
    found.modules.add(path="", class_name="Model")
    found.modules.add(path="head", class_name="Linear")
    assert verdict(tree_of(found), "head.output")


def test_models_of_both_clients_answer(client: interpose.Client) -> None:
    model = client.model()
    assert model.serves("model.layers[1].mlp.output") and not model.serves("model.layers[7].output")


async def test_a_model_of_asyncio_answers_without_a_wait(service) -> None:
    async with await interpose.connect_async(service.address, progress=False) as client:
        model = await client.model()
        assert (
            model.serves("model.layers[1].mlp.output") and "layers[7]" in model.serves("model.layers[7].output").reason
        )
