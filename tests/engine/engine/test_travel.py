"""How often a trace and an event are serialized and parsed on their way, and what travels on each hop.

`docs/how-a-trace-travels.md` has the numbers in a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench
from tests.engine.engine.travel import Way
from tests.engine.harness import Block

MIB = 1 << 20
INVOKES = 32
WORDS = ["x" * (8 * MIB)]
# What a hop may carry beside the trace: prompts, names, what the texts compile to, and for each message what vLLM adds.
AROUND = 64 << 10

# From the ingress to a worker, each part parses the trace once, and no part serializes it again.
TRACE = {("client", "serialized"): 1, ("ingress", "parsed"): 1, ("engine", "parsed"): 1, ("worker", "parsed"): 1}
# Of 98 events the ingress makes `Accepted`, the engine an `Output` for each invoke, a worker `Saves` and `Accounting` for each,
# and the session `Done`. The session looks into what was generated and saved.
EVENTS = {
    ("ingress", "serialized"): 1,
    ("engine", "serialized"): INVOKES,
    ("worker", "serialized"): 2 * INVOKES,
    ("session", "serialized"): 1,
    ("session", "parsed"): 2 * INVOKES + 1,
    ("client", "parsed"): 3 * INVOKES + 2,
}


@pytest.fixture
def way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    made = Way(bench.engine, monkeypatch)
    yield made
    made.close()


def trace_of(bench: Bench, *blocks: Block) -> pb.Trace:
    """Return a trace as a client sends it."""
    trace = bench.engine.trace(list(blocks), {})
    for invoke, block in zip(trace.invokes, blocks, strict=True):
        invoke.prompt.token_ids.ids.extend(block.prompt)
    return trace


def kinds(events: list[pb.Event]) -> Counter[str]:
    return Counter(str(event.WhichOneof("kind")) for event in events)


def counted(way: Way, what: str) -> dict[tuple[str, str], int]:
    return {(part, how): count for (kind, part, how), count in way.counts.calls.items() if kind == what}


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_a_trace_of_many_invokes(bench: Bench, way: Way) -> None:
    blocks = [Block([5, 6, 7 + i], "n = len(words[0]).save()", captured={"words": WORDS}) for i in range(INVOKES)]
    events = await way.submit(trace_of(bench, *blocks))
    assert kinds(events) == {"accepted": 1, "output": INVOKES, "saves": INVOKES, "accounting": INVOKES, "done": 1}
    saved = [event.saves.names[0].value.integer for event in events if event.HasField("saves")]
    assert saved == [8 * MIB] * INVOKES
    assert counted(way, "trace") == TRACE
    assert counted(way, "event") == EVENTS
    there = [
        ("client", "ingress"),
        ("ingress", "session"),
        ("session", "engine"),
        ("engine", "core"),
        ("core", "worker"),
    ]
    for hop in there:
        assert 8 * MIB < way.counts.sent[hop] < 8 * MIB + AROUND, (hop, way.counts.sent[hop])
    back = [("worker", "engine"), ("engine", "session"), ("session", "ingress"), ("ingress", "client")]
    assert {hop: way.counts.messages[hop] for hop in (*there, *back)} == {
        ("client", "ingress"): 1,
        ("ingress", "session"): 1,
        ("session", "engine"): 1,
        ("engine", "core"): 1
        + INVOKES
        + INVOKES,  # the trace, a request for each invoke, and the question how it ended
        ("core", "worker"): 1 + 2 + INVOKES,  # the trace, the two calls of the only step, and the same questions
        ("worker", "engine"): 1 + INVOKES,
        ("engine", "session"): 1 + 3 * INVOKES,  # the replica's name, and the events
        ("session", "ingress"): 2 + 3 * INVOKES,
        ("ingress", "client"): 2 + 3 * INVOKES,
    }


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_a_trace_of_one_invoke_costs_no_further_call(bench: Bench, way: Way) -> None:
    events = await way.submit(trace_of(bench, Block([5, 6], "n = len(words).save()", captured={"words": ["a"]})))
    assert kinds(events) == {"accepted": 1, "output": 1, "saves": 1, "accounting": 1, "done": 1}
    assert counted(way, "trace") == TRACE
    assert way.counts.messages["engine", "core"] == 2  # the request with its trace, and the question how it ended


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_an_event_that_changes_on_the_way_is_serialized_again(bench: Bench, way: Way) -> None:
    """A failure names the trace as the client knows it."""
    trace = trace_of(bench, Block([5, 6], "1 / 0"))
    events = await way.submit(trace)
    [failed] = [event.failed for event in events if event.HasField("failed")]
    assert failed.trace_id == trace.id and failed.exception_type == "ZeroDivisionError"
    assert counted(way, "event")["session", "serialized"] == 2
