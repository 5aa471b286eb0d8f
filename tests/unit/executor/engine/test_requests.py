"""Which traces are checked on the event loop, and which in a thread beside it."""

from __future__ import annotations

import pytest

from executor.engine.requests import is_quick
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Value


def invoke(**prompt: object) -> pb.Invoke:
    return pb.Invoke(prompt=pb.Prompt(**prompt))  # type: ignore[arg-type]


IDS = invoke(token_ids=pb.TokenIds(ids=[1, 2]))
NUMBER = Binding(name="temperature", value=Value(real=0.5))
GRAMMAR = Binding(name="structured_outputs", value=Value(ref=0))


@pytest.mark.parametrize(
    ("trace", "quick"),
    [
        (pb.Trace(invokes=[IDS], sampling=[NUMBER]), True),
        (pb.Trace(invokes=[invoke(text="short"), pb.Invoke(joint=True)]), True),
        (pb.Trace(invokes=[invoke(text="x" * 10_000)]), False),
        (pb.Trace(invokes=[invoke(chat=pb.Chat(messages=[]))]), False),
        (pb.Trace(invokes=[IDS], sampling=[GRAMMAR]), False),
        (pb.Trace(invokes=[pb.Invoke(prompt=IDS.prompt, sampling=[GRAMMAR])]), False),
        (pb.Trace(invokes=[IDS] * 32), False),
    ],
)
def test_what_is_quick(trace: pb.Trace, quick: bool) -> None:
    assert is_quick(trace) is quick
