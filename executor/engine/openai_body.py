"""Checks the JSON of an OpenAI-compatible request before vLLM sees it."""

from __future__ import annotations

import json
from typing import Any

# Fields of vLLM's that would reach beyond the request: other requests, the engine's own data, other machines.
_REFUSED = {
    "vllm_xargs": "arguments of the engine's own parts cannot be set here",
    "kv_transfer_params": "the engine moves no KV cache",
    "ec_transfer_params": "the engine moves no encoder cache",
    "request_id": "the service chooses the ids of requests",
    "session_id": "the service chooses the engine of a request",
    "priority": "the operator sets the weights of tenants",
    "use_beam_search": "beam search is not served; use n and temperature",
    "prompt_embeds": "prompts are texts or token ids; write a trace that changes model.embed.output",
    "chat_template": "the operator chooses the model's chat template",
    "mm_payload": "the service takes text",
    "return_mm_kwargs": "the service takes text",
    "mm_processor_kwargs": "the service takes text",
    "media_io_kwargs": "the service takes text",
}
_DEEPEST = 64


class BodyRefused(ValueError):
    """A body that the endpoint does not take; the message is for the client."""


def checked_body(data: bytes, most: int) -> dict[str, Any]:
    """Return a request's fields without `interpose`.

    Args:
        data: the body, JSON.
        most: prompts times sequences, at most.

    Raises:
        BodyRefused: the body is no JSON object, or has a field that the endpoint does not take.
    """
    body = parsed(data)
    body.pop("interpose", None)
    for name, why in _REFUSED.items():
        if body.pop(name, None) not in (None, False, 0, [], {}):
            raise BodyRefused(f"{name}: {why}")
    count = sequences(body)
    if count > most:
        raise BodyRefused(f"the request asks for {count} sequences; the limit is {most}")
    for message in body.get("messages") or ():
        parts = message.get("content") if isinstance(message, dict) else None
        kinds = {part.get("type") for part in parts if isinstance(part, dict)} if isinstance(parts, list) else set()
        if kinds - {"text", "refusal", "thinking"}:
            raise BodyRefused("messages: the service takes parts of type text only")
    return body


def parsed(data: bytes) -> dict[str, Any]:
    """Return a body's JSON object.

    Raises:
        BodyRefused: the body is not a JSON object, or is nested too deeply.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BodyRefused(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise BodyRefused("the body is not a JSON object")
    if _depth(body) > _DEEPEST:
        raise BodyRefused(f"the body is nested more than {_DEEPEST} deep")
    return body


def sequences(body: dict[str, Any]) -> int:
    """Return the number of a body's prompts, times the sequences of each."""
    prompts = body.get("prompt")
    many = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    count = body.get("n")
    return (len(prompts) if many and isinstance(prompts, list) else 1) * (count if type(count) is int else 1)


def _depth(value: Any) -> int:
    """Return how deeply lists and dicts are nested, up to one more than is taken."""
    depth, level = 0, [value]
    while level and depth <= _DEEPEST:
        depth += 1
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
    return depth
