"""Which traces are checked on the event loop, and which prompts may come from the prefix cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from executor.core.programs import made, units_of
from executor.engine.requests import is_quick, may_use_prefix
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


@pytest.mark.parametrize(
    ("text", "most", "state", "may"),
    [
        ("x = 1\n", 100, False, True),
        ("x = 1\n", 100, True, False),  # a state in place of keys and values
        ("x = 1\n", 1, False, False),  # the text does not compile
        ("x = model.layers[0].output\n", 100, False, False),
    ],
)
def test_which_prompts_may_come_from_the_cache(text: str, most: int, state: bool, may: bool) -> None:
    reads = [Binding(name="model", value=Value(module=""))]
    trace = pb.Trace(invokes=[pb.Invoke(program=pb.Program(source=text, filename="<cell>", first_line=1, reads=reads))])
    codes = {unit.key: made(unit, most) for unit in units_of(trace)}
    config = SimpleNamespace(model_config=SimpleNamespace(has_inner_state=state))
    assert may_use_prefix(trace, 0, codes, config) is may
    assert may_use_prefix(trace, 0, {}, config) is False
