"""Pieces of an answer that come together go to the client together, and none of them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from actors.protocol import Lease
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import bundles
from serve_app.ingress.calls import Serialized
from serve_app.ingress.openai_calls import OpenAICalls, _Answer
from serve_app.ingress.openai_saves import Wanted

FIRST = pb.Http(status=200, content_type="text/event-stream", data=b"data: 1\n\n")
SECOND, THIRD = pb.Http(data=b"data: 2\n\n"), pb.Http(data=b"data: 3\n\n")
DONE = pb.Http(data=b"data: [DONE]\n\n")
FAILED = pb.Event(failed=failure(pb.ERROR_CODE_INTERVENTION, "line 1: no"))


def _said(messages: Sequence[Sequence[pb.Http | pb.Event]]) -> tuple[list[pb.Http], str]:
    """Return the parts that a client gets, and what the answer fails with."""

    async def events() -> AsyncGenerator[Any, None]:
        for message in messages:
            some = [one if isinstance(one, pb.Event) else pb.Event(http=one) for one in message]
            for data in bundles(one.SerializeToString() for one in some):
                yield Serialized(data)

    async def read() -> tuple[list[pb.Http], str]:
        parts: list[pb.Http] = []
        answer = _Answer(events(), Lease.__new__(Lease), Wanted())
        try:
            async for part in OpenAICalls()._parts(answer):
                parts.append(part)
        except ServiceFailure as error:
            return parts, error.failure.message
        return parts, ""

    return asyncio.run(read())


def test_pieces_of_one_message_are_one_part() -> None:
    parts, failed = _said([[FIRST], [SECOND, THIRD], [DONE]])
    assert not failed
    assert [part.data for part in parts] == [FIRST.data, SECOND.data + THIRD.data, DONE.data]
    assert (parts[0].status, parts[0].content_type) == (200, "text/event-stream")


def test_the_status_is_that_of_the_first_piece() -> None:
    parts, _ = _said([[FIRST, SECOND], [THIRD, DONE]])
    assert [part.data for part in parts] == [FIRST.data + SECOND.data, THIRD.data + DONE.data]
    assert (parts[0].status, parts[0].content_type) == (200, "text/event-stream")


def test_pieces_before_a_failure_are_sent() -> None:
    parts, failed = _said([[FIRST], [SECOND, THIRD, FAILED]])
    assert [part.data for part in parts] == [FIRST.data, SECOND.data + THIRD.data]
    assert failed == "line 1: no"
