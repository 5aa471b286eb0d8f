"""The tokens that a trace may need, before anything of it has run."""

from __future__ import annotations

from collections.abc import Iterable

from interpose.v1 import model_pb2, value_pb2
from interpose.v1 import trace_pb2 as pb

# Tokens that a prompt's template and the tokenizer's own marks add, beside those of the text.
_MARKS = 16
_LIMIT = "max_tokens"


def tokens_of(trace: pb.Trace, description: model_pb2.ModelDescription | None) -> int:
    """Return the tokens of a trace's prompts, and the tokens that it may generate.

    A text counts with its bytes, as no tokenizer makes more tokens of it than that, and a prompt never with more than the model
    takes. What the trace did not need is given back when it has ended.

    Args:
        trace: a trace that has passed the checks.
        description: of the trace's model, if it is known.
    """
    if trace.HasField("openai"):
        return trace.openai.tokens
    longest = description.max_model_len if description is not None else 0
    usual = _asked(trace.sampling, 1, longest)
    tokens = 0
    for invoke in trace.invokes:
        if not invoke.joint:
            prompt = _prompt(invoke.prompt)
            generated = _asked(invoke.sampling, usual, longest)
            tokens += min(prompt + generated, longest) if longest else prompt + generated
    return tokens


def _prompt(prompt: pb.Prompt) -> int:
    """Return the largest number of tokens of a prompt."""
    if prompt.WhichOneof("kind") == "token_ids":
        return len(prompt.token_ids.ids)
    if prompt.WhichOneof("kind") == "chat":
        return sum(len(one.content.encode()) + len(one.role) + _MARKS for one in prompt.chat.messages) + _MARKS
    return len(prompt.text.encode()) + _MARKS


def _asked(sampling: Iterable[value_pb2.Binding], usual: int, longest: int) -> int:
    """Return the tokens that sampling parameters allow; `longest` where they set no limit."""
    asked = usual
    for binding in sampling:
        if binding.name == _LIMIT:
            value = binding.value
            asked = max(0, value.integer) if value.WhichOneof("kind") == "integer" else longest
    return asked
