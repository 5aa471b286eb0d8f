"""The page of what checkpoints get is what was recorded: each has a verdict, and each refusal its reason."""

from __future__ import annotations

import pytest

from tests.fidelity.checkpoints import GIVEN, PAGE, UNKNOWN, Found, general, parse, render
from tests.fidelity.configurations import CONFIGURATIONS

LEAST = 30
ALWAYS = ("blocks[i].resid_pre", "blocks[i].resid_post", "final_norm.output", "unembed.output")


@pytest.fixture(scope="module")
def found() -> Found:
    return parse(PAGE.read_text())


def test_the_page_is_what_was_recorded(found: Found) -> None:
    assert render(found) == PAGE.read_text()


def test_each_checkpoint_that_is_asked_for_has_a_verdict(found: Found) -> None:
    assert list(found) == [one.architecture for one in CONFIGURATIONS]
    assert len(found) >= LEAST and len({name for one in CONFIGURATIONS for name in one.checkpoints}) > len(found)
    assert not [name for name, rows in found.items() if rows.get("") == [UNKNOWN] or not rows]


def test_no_refusal_is_without_a_reason(found: Found) -> None:
    """A value that is not given says why, and so does a model without any."""
    for name, rows in found.items():
        for value, said in rows.items():
            assert said and all(why == GIVEN or len(why.split()) > 3 for why in said), (name, value, said)
            assert all(general(why) == why for why in said), (name, value, said)


def test_each_model_that_is_served_gives_its_stream_and_logits(found: Found) -> None:
    for name, rows in found.items():
        assert "" in rows or all(rows[value] == [GIVEN] for value in ALWAYS), (name, rows)


def test_a_page_is_read_as_it_was_written() -> None:
    given: Found = {one.architecture: {"blocks[i].attn.q": [GIVEN]} for one in CONFIGURATIONS}
    given["LlamaForCausalLM"] = {"": ["Sparse [attention] is *not* supported | on CPU."]}
    given["Qwen2ForCausalLM"] = {
        "blocks[i].attn.q": [GIVEN, "blocks[i] has none"],
        "blocks[i].mlp.up": ["no | such <part>"],
    }
    assert parse(render(given)) == given
