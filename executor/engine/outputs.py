"""Turns vLLM's outputs of a request into the protocol's outputs and results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from interpose.contract.result import Logprob, Result
from interpose.v1 import trace_pb2 as pb


def output_event(index: int, output: Any, completion: Any, sent_text: int, sent_ids: int, reason: str) -> pb.Event:
    """Return what is new in a request's cumulative output.

    Args:
        index: the invoke's index.
        output, completion: vLLM's RequestOutput and its only CompletionOutput.
        sent_text, sent_ids: how many characters and token ids were sent before.
        reason: why the request has ended, or "" if it has not ended.
    """
    event = pb.Output(
        invoke=index,
        text=completion.text[sent_text:],
        token_ids=list(completion.token_ids)[sent_ids:],
        finished=bool(reason),
        finish_reason=reason,
        logprobs=[_message(position) for position in (completion.logprobs or ())[sent_ids:]],
    )
    if sent_ids == 0:
        event.prompt_token_ids.extend(output.prompt_token_ids or ())
        event.prompt_logprobs.extend(_message(position) for position in output.prompt_logprobs or ())
    return pb.Event(output=event)


def result_of(output: Any, completion: Any, reason: str) -> Result:
    """Return a finished request's result."""
    return Result(
        completion.text,
        list(completion.token_ids),
        reason,
        list(output.prompt_token_ids or ()),
        _positions(completion.logprobs),
        _positions(output.prompt_logprobs),
    )


def _positions(positions: Iterable[Any] | None) -> list[Any] | None:
    if positions is None:
        return None
    return [  # In vLLM's flat form the first place of a prompt is empty; in the other form it is None.
        {i: Logprob(one.logprob, one.rank, one.decoded_token) for i, one in position.items()} if position else None
        for position in positions
    ]


def _message(position: Any) -> pb.TokenLogprobs:
    message = pb.TokenLogprobs()
    for token, one in (position or {}).items():
        message.token_ids.append(token)
        message.logprobs.append(one.logprob)
        message.ranks.append(one.rank or 0)
        if one.decoded_token is not None:
            message.texts.append(one.decoded_token)
    return message
