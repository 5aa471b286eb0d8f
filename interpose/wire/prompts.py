"""Prompts as messages, from text, ids, tensors, tokenizer output or chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from interpose.contract.errors import InvalidArgument
from interpose.v1.trace_pb2 import Chat, ChatMessage, Prompt, TokenIds
from interpose.wire import arrays

_TAKEN = (
    "a string, a list of token ids, a 1-d tensor, a tokenizer's output (input_ids) or chat messages (role, content)"
)


def too_long(tokens: int, max_model_len: int, max_prompt_tokens: int) -> str:
    """Return the reason why a prompt is too long, "" if it is not; a limit of 0 is unknown."""
    if max_model_len and tokens >= max_model_len:
        return f"the prompt has {tokens} tokens; with one to generate, the model takes at most {max_model_len - 1}"
    if max_prompt_tokens and tokens > max_prompt_tokens:
        return (
            f"the prompt has {tokens} tokens; this engine runs a traced prompt in one step, and a step has "
            f"{max_prompt_tokens}: use a shorter one, or have max_num_batched_tokens raised where the model is served"
        )
    return ""


def encode_prompt(prompt: Any, *, vocab_size: int = 0, max_model_len: int = 0, max_prompt_tokens: int = 0) -> Prompt:
    """Return a prompt as a message.

    Args:
        prompt: a str; ids as a list, or a tensor of shape [tokens] or [1, tokens]; a tokenizer's output with `input_ids`
            and perhaps `attention_mask`, whose zeros are padding and left out; or a list of `{"role", "content"}` dicts.
        vocab_size: ids from here on are refused; 0: unknown.
        max_model_len: tokens that a prompt and what follows it may have together; 0: unknown.
        max_prompt_tokens: longer prompts are refused; 0: unknown.

    Raises:
        InvalidArgument: anything else.
    """
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, Mapping) or hasattr(prompt, "input_ids"):
        ids = _tokenizer_output(prompt)
    elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
        return Prompt(chat=Chat(messages=[_message(message) for message in prompt]))
    elif isinstance(prompt, list | tuple) and any(isinstance(item, str) for item in prompt):
        raise InvalidArgument(
            "a trace takes one prompt, this is a list of strings; give each its own block: `with model.trace() as tracer:` "
            "and in it `with tracer.invoke(prompt):`"
        )
    else:
        ids = _row(prompt, "the prompt")
    if not ids:
        raise InvalidArgument("the prompt is empty")
    worst = max(ids) if min(ids) >= 0 else min(ids)
    if worst < 0 or (vocab_size and worst >= vocab_size):
        raise InvalidArgument(f"token id {worst} is outside the model's vocabulary (0 to {vocab_size - 1})")
    refusal = too_long(len(ids), max_model_len, max_prompt_tokens)
    if refusal:
        raise InvalidArgument(refusal)
    return Prompt(token_ids=TokenIds(ids=ids))


def _tokenizer_output(prompt: Any) -> list[int]:
    fields = prompt if isinstance(prompt, Mapping) else vars(prompt).get("data", vars(prompt))
    if "input_ids" not in fields:
        raise InvalidArgument(
            f"a prompt that is a dict needs the key input_ids; it has {', '.join(map(str, fields)) or 'none'}"
        )
    ids = _row(fields["input_ids"], "input_ids")
    mask = fields.get("attention_mask")
    if mask is None:
        return ids
    keep = _row(mask, "attention_mask")
    if len(keep) != len(ids):
        raise InvalidArgument(f"attention_mask has {len(keep)} entries for {len(ids)} input_ids")
    return [token for token, kept in zip(ids, keep, strict=True) if kept]


def _row(tokens: Any, what: str) -> list[int]:
    """Return the integers of a list, a tensor or an array, of shape [tokens] or [1, tokens]."""
    if arrays.is_tensor(tokens):
        tokens = tokens.detach().cpu().numpy()
    try:
        row = np.asarray(tokens)
    except (ValueError, TypeError):
        row = np.asarray(None)
    if row.size == 0 and row.ndim in (1, 2):
        return []
    if row.ndim == 2 and row.shape[0] > 1:
        raise InvalidArgument(
            f"{what} has shape {list(row.shape)}: one prompt, one row; give each row its own `with tracer.invoke(row):`"
        )
    if row.ndim == 2:
        row = row[0]
    if row.ndim != 1 or row.dtype.kind not in "iu":
        kind = type(tokens).__name__ + (
            f" of {row.dtype} with shape {list(row.shape)}" if isinstance(tokens, np.ndarray) else ""
        )
        raise InvalidArgument(f"{what} is a {kind}; a prompt is {_TAKEN}")
    return [int(token) for token in row]


def _message(message: Any) -> ChatMessage:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise InvalidArgument(f"a chat message is a dict with role and content, both strings, not {message!r}")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise InvalidArgument(f"role and content of a chat message are strings, not {message!r}")
    return ChatMessage(role=role, content=content)
