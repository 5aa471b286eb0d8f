"""Turns an invoke into a prompt and sampling parameters for vLLM, or says why it cannot."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from executor.core.programs import Code, Unit
from executor.core.request import step_tokens
from executor.engine.sampling import checked
from executor.plan.prompt_rows import Asked, asked_of_prompt, last_of, rows_of_prompt
from executor.plan.row_values import RowValues
from executor.plan.tails import Touched
from interpose.v1 import model_pb2, value_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import WireError
from interpose.wire.prompts import too_long
from interpose.wire.resolver import Resolver

# Kinds of values that are numbers; every other sampling parameter may be something that takes long to check.
_NUMBERS = frozenset({"none", "boolean", "integer", "real"})
_QUICK_INVOKES = 4
_QUICK_CHARACTERS = 1000


class _Plain(Resolver):
    """A resolver that calls nothing that the sender names."""

    def run_own(self, do: Callable[[], Any]) -> None:
        raise WireError("a sampling parameter is made of numbers, texts, lists and dicts")


def is_quick(trace: pb.Trace) -> bool:
    """Whether a trace's prompts and sampling parameters are checked in well under a millisecond."""
    if len(trace.invokes) > _QUICK_INVOKES:
        return False
    sampling = [binding for invoke in (trace, *trace.invokes) for binding in invoke.sampling]
    prompts = [invoke.prompt for invoke in trace.invokes if not invoke.joint]
    return all(binding.value.WhichOneof("kind") in _NUMBERS for binding in sampling) and all(
        prompt.WhichOneof("kind") == "token_ids"
        or (len(prompt.text) <= _QUICK_CHARACTERS and not prompt.HasField("chat"))
        for prompt in prompts
    )


def may_use_prefix(trace: pb.Trace, index: int, codes: Mapping[str, Code], config: Any) -> bool:
    """Whether an invoke's prompt may come from the prefix cache, as its block asks for no row.

    Args:
        trace, index: the invoke.
        codes: what the trace's texts compile to. A text that did not compile is not looked at.
        config: the engine's VllmConfig. A model that keeps a state in place of keys and values computes whole prompts.
    """
    return _looked_at(trace, index, codes, config) and asked_of_prompt(trace, index) is None


def last_rows(
    trace: pb.Trace,
    index: int,
    codes: Mapping[str, Code],
    config: Any,
    tokens: int,
    values: RowValues | None,
) -> dict[str, Any]:
    """Return for how many of the last rows of its prompt an invoke's block may ask.

    The rows before may come from the prefix cache.

    Args:
        trace, index, codes, config: as of `may_use_prefix`.
        tokens: the length of the prompt.
        values: the values of the model; None: a block that asks for any computes its whole prompt.

    Returns:
        What the workers are told of it, as attributes of `InvokeRequest`; {}: the whole prompt is to be computed.
    """
    if not _looked_at(trace, index, codes, config):
        return {}
    touched = rows_of_prompt(trace, index, values)
    return {} if isinstance(touched, Asked) else told(touched, tokens, config)


def told(touched: Touched, tokens: int, config: Any) -> dict[str, Any]:
    """Return what `last_rows` does, of the rows for which a block may ask."""
    last = last_of(touched, tokens, step_tokens(config.scheduler_config))
    return {} if last is None else {"prefix": True, "last": last, "from_start": touched.first is not None}


def _looked_at(trace: pb.Trace, index: int, codes: Mapping[str, Code], config: Any) -> bool:
    """Return whether it is looked at which rows of its prompt a block asks for."""
    compiled = codes.get(Unit.of_block(trace.invokes[index].program).key)
    return not config.model_config.has_inner_state and isinstance(compiled, bytes)


def sampling_of(
    trace: pb.Trace, invoke: pb.Invoke, description: model_pb2.ModelDescription, config: Any, tokenizer: Any
) -> dict[str, Any]:
    """Return an invoke's sampling parameters; without a number of tokens, it generates one.

    Args:
        trace: has the defaults for its invokes, and the table that values refer to.
        invoke: an invoke of the trace.
        description: the description of the served model.
        config: the engine's VllmConfig.
        tokenizer: the model's tokenizer.

    Raises:
        ValueError: a parameter does not exist, with similar names; or vLLM would refuse the parameters, with its reason.
    """
    known = description.sampling_parameters
    sampling: dict[str, Any] = {}
    decoder = Decoder(
        value_pb2.Objects(values=trace.scope.values), get_blob=_no_blob, library="numpy", resolver=_Plain()
    )
    for binding in (*trace.sampling, *invoke.sampling):
        if binding.name not in known:
            near = difflib.get_close_matches(binding.name, known, n=3, cutoff=0.5)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"unknown sampling parameter {binding.name!r}{hint}")
        sampling[binding.name] = decoder.decode(binding.value)
    sampling.setdefault("max_tokens", 1)
    return checked(sampling, config, tokenizer)


def prompt_of(prompt: pb.Prompt, description: model_pb2.ModelDescription, tokenizer: Any) -> dict[str, Any]:
    """Return a prompt's token ids.

    Raises:
        ValueError: the prompt is empty, is too long, or has token ids that the model does not have.
    """
    kind = prompt.WhichOneof("kind")
    if kind == "text":
        _check_length(len(prompt.text), description, tokenizer)
        ids = tokenizer.encode(prompt.text)
    elif kind == "token_ids":
        ids = list(prompt.token_ids.ids)
    elif kind == "chat":
        _check_length(sum(len(message.content) for message in prompt.chat.messages), description, tokenizer)
        messages = [{"role": message.role, "content": message.content} for message in prompt.chat.messages]
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:
            raise ValueError(f"the model's chat template does not take these messages: {error}") from None
    else:
        raise ValueError("an invoke needs a prompt: tracer.invoke(prompt)")
    if not ids:
        raise ValueError("the prompt is empty")
    refusal = too_long(len(ids), description.max_model_len, description.max_prompt_tokens)
    if refusal:
        raise ValueError(refusal)
    if max(ids) >= description.vocab_size:
        raise ValueError(f"the prompt has the token id {max(ids)}; the vocabulary ends at {description.vocab_size - 1}")
    return {"prompt_token_ids": ids}


def _check_length(characters: int, description: model_pb2.ModelDescription, tokenizer: Any) -> None:
    """Refuse a text that is longer than any prompt the model takes.

    The check comes before the tokenizer, which takes long on such a text.
    """
    tokens = -(-characters // tokenizer.max_chars_per_token)
    refusal = too_long(tokens, description.max_model_len, description.max_prompt_tokens)
    if refusal:
        raise ValueError(f"{refusal} (a text of {characters} characters has at least so many)")


def _no_blob(blob: value_pb2.Blob) -> Any:
    raise WireError("a sampling parameter cannot be that large")
