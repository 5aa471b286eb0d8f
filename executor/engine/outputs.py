"""Turns vLLM's outputs of a request into the protocol's outputs and the request's result.

vLLM gives what is new since its last output. An output of a trace that does not stream is a sign of life, not a result. So such
outputs are held for some time, and an output that comes in the meantime joins the held output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from interpose.contract.result import Logprob, Result
from interpose.v1 import trace_pb2 as pb

# Tokens from one of vLLM's outputs to the next, of a trace that does not stream. The first token has an output of its own.
TOKENS_AT_ONCE = 32
HOLD_SECONDS = 0.5


class Outputs:
    """The outputs of one request, which become events and a result.

    Args:
        index: the invoke's index.
        send: takes each serialized Output event but for the last.
        stream: whether each output is sent at once.
    """

    def __init__(self, index: int, send: Callable[[bytes], None], stream: bool) -> None:
        self._index = index
        self._send = send
        self._stream = stream
        self._result = Result()
        self._held: pb.Output | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, output: Any) -> None:
        """Take an output of vLLM, with what is new since the output before.

        Args:
            output: vLLM's RequestOutput.
        """
        first, result = not self._result.prompt_token_ids, self._result
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        held = self._held = self._held or pb.Output(invoke=self._index)
        held.text += completion.text
        held.token_ids.extend(ids)
        result.text += completion.text
        result.token_ids.extend(ids)
        if completion.logprobs is not None:
            positions = list(completion.logprobs)
            held.logprobs.extend(_message(position) for position in positions)
            result.logprobs = [*(result.logprobs or ()), *_positions(positions)]
        if output.prompt_logprobs is not None:
            held.prompt_logprobs.extend(_message(position) for position in output.prompt_logprobs)
            positions = _positions(output.prompt_logprobs)  # none in the outputs after the first
            result.prompt_logprobs = [*(result.prompt_logprobs or ()), *(position or None for position in positions)]
        if first:
            result.prompt_token_ids = list(output.prompt_token_ids or ())
            held.prompt_token_ids.extend(result.prompt_token_ids)
        if output.finished:
            result.finish_reason = completion.finish_reason or "stop"
        elif self._stream:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._flush)

    def result(self) -> Result:
        """Return the result of the finished request."""
        return self._result

    def last(self, reason: str, logs: int) -> bytes:
        """Return the last output, a serialized event.

        Args:
            reason: why the request has ended.
            logs: how many texts its block has printed.
        """
        last = self._taken()
        last.finished, last.finish_reason, last.logs = True, reason, logs
        return pb.Event(output=last).SerializeToString()

    def close(self) -> None:
        """Send nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush(self) -> None:
        self._send(pb.Event(output=self._taken()).SerializeToString())

    def _taken(self) -> pb.Output:
        self.close()
        held, self._held = self._held or pb.Output(invoke=self._index), None
        return held


def _positions(positions: Iterable[Mapping[int, Any] | None]) -> list[Any]:
    # In vLLM's flat form the first position of a prompt is empty; in the other form it is None.
    return [
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
