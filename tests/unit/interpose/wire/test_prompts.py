"""Every form of a prompt, and what is none."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest

from interpose.contract.errors import InvalidArgument
from interpose.wire.prompts import encode_prompt


def ids(prompt, **limits):
    return list(encode_prompt(prompt, **limits).token_ids.ids)


def test_text_and_chat():
    assert encode_prompt("Hello").text == "Hello"
    chat = encode_prompt([{"role": "user", "content": "Hi"}]).chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "Hi")]


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        np.array([[1, 2, 3]], dtype=np.uint8),
        [np.int64(1), 2, 3],
        {"input_ids": [1, 2, 3]},
        {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]]},
        {"input_ids": np.array([[0, 0, 1, 2, 3]]), "attention_mask": np.array([[0, 0, 1, 1, 1]])},
        UserDict(input_ids=[1, 2, 3]),
    ],
)
def test_ids(prompt):
    assert ids(prompt) == [1, 2, 3]


def test_torch():
    import torch

    tensor = torch.tensor([[1, 2, 0]])
    assert ids(tensor) == ids(tensor[0]) == [1, 2, 0]
    assert ids({"input_ids": tensor, "attention_mask": torch.tensor([[1, 1, 0]])}) == [1, 2]


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "empty"),
        ({"input_ids": [1], "attention_mask": [0]}, "empty"),
        (["a", "b"], "tracer.invoke"),
        ([[1, 2], [3, 4]], "one prompt"),
        ([[1, 2], [3]], "a prompt is"),
        ([1.5], "a prompt is"),
        ([True], "a prompt is"),
        (object(), "a prompt is"),
        (5, "a prompt is"),
        (b"bytes", "a prompt is"),
        ([-1], "vocabulary"),
        ([512], "vocabulary"),
        ([1] * 32, "takes at most 31"),
        ([1] * 21, "21 tokens.* one step, .* has 20: .*max_num_batched_tokens"),
        ({"ids": [1]}, "input_ids"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask"),
        ([{"role": "user"}], "role and content"),
        ([{"role": "user", "content": ["x"]}], "strings"),
    ],
)
def test_refused(prompt, message):
    with pytest.raises(InvalidArgument, match=message):
        encode_prompt(prompt, vocab_size=512, max_model_len=32, max_prompt_tokens=20)
