"""How often a trace and an event are serialized and parsed on their way, and what travels on each hop.

`docs/how-a-trace-travels.md` has the numbers in a table.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.core.ended import Ended
from executor.core.programs import units_of
from executor.core.request import InvokeRequest, Opened
from executor.engine.requests import may_use_prefix
from interpose.contract.result import Result
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Items, Value
from interpose.wire.events import apart, kind_of
from tests.engine.conftest import Bench
from tests.engine.engine.travel import Way
from tests.engine.harness import Block, compile_here, request_of

MIB = 1 << 20
PAGE = Path(__file__).parents[3] / "docs" / "how-a-trace-travels.md"
INVOKES = 32
WORDS = ["x" * (8 * MIB)]
# What a hop may carry beside the trace: prompts, names, what the texts compile to, and for each message what vLLM adds.
AROUND = 64 << 10

# From the ingress to a worker, each part parses the trace once, and no part serializes it again.
TRACE = {("client", "serialized"): 1, ("ingress", "parsed"): 1, ("engine", "parsed"): 1, ("worker", "parsed"): 1}
# Of 98 events the ingress makes `Accepted`, the engine an `Output` for each invoke, a worker `Saves` and `Accounting` for each,
# and the session `Done`. The session looks into what was generated and saved. The client parses `Accepted`, the bundle of all
# other events, and `Done`.
EVENTS = {
    ("ingress", "serialized"): 1,
    ("engine", "serialized"): INVOKES,
    ("worker", "serialized"): 2 * INVOKES,
    ("session", "serialized"): 1,
    ("session", "parsed"): 3 * INVOKES + 1,
    ("client", "parsed"): 3,  # Accepted, the bundle of all other events but the last, and Done
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


def told(head: str) -> dict[str, list[str]]:
    """Return the rows of a table of the page, by their first cell: what each cell says of today."""
    rows = PAGE.read_text().split(head)[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: [cell.partition(" / ")[0] for cell in others] for name, *others in cells}


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
    columns = [("trace", "serialized"), ("trace", "parsed"), ("event", "serialized"), ("event", "parsed")]
    assert told("| part |") == {
        part: [str(way.counts.calls[what, part, how]) for what, how in columns]
        for part in ("client", "ingress", "session", "engine", "worker")
    }
    assert told("| hop |") == {
        " → ".join(hop): [str(messages), f"{way.counts.sent[hop] / MIB:.1f}"]
        for hop, messages in way.counts.messages.items()
    }
    there = [
        ("client", "ingress"),
        ("ingress", "session"),
        ("session", "engine"),
        ("engine", "core"),
        ("core", "worker"),
    ]
    for hop in there:
        assert 8 * MIB < way.counts.sent[hop] < 8 * MIB + AROUND, (hop, way.counts.sent[hop])
    assert way.counts.messages == {
        ("client", "ingress"): 1,
        ("ingress", "session"): 1,
        ("session", "engine"): 1,
        ("engine", "core"): 1 + INVOKES + 1,  # the trace, a request for each invoke, and the question how all ended
        ("core", "worker"): 1 + 2 + 1,  # the trace, the two calls of the only step, and the same question
        ("worker", "engine"): 1 + 1,
        ("engine", "session"): 3,  # the replica's name, the events, and their end
        ("session", "ingress"): 3,  # Accepted, the events, and Done
        ("ingress", "client"): 3,
    }


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_a_trace_of_one_invoke_costs_no_further_call(bench: Bench, way: Way) -> None:
    events = await way.submit(trace_of(bench, Block([5, 6], "n = len(words).save()", captured={"words": ["a"]})))
    assert kinds(events) == {"accepted": 1, "output": 1, "saves": 1, "accounting": 1, "done": 1}
    assert counted(way, "trace") == TRACE
    assert way.counts.messages["engine", "core"] == 2  # the request with its trace, and the question how it ended


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_a_session_parses_a_trace_that_shares_its_variables(bench: Bench, way: Way) -> None:
    trace = trace_of(bench, Block([5, 6], "acc.append(1)"), Block([5, 7], "acc.append(2)"))
    trace.scope.values.add(list=Items())
    trace.shared.add(name="acc", value=Value(ref=0))
    for invoke in trace.invokes:
        invoke.program.reads.add(name="acc", value=Value(ref=0))
    trace.variables.add(id="v", entry=0)
    events = await way.submit(trace)
    [saves] = [event.saves for event in events if event.HasField("saves") and event.saves.invoke < 0]
    assert [(one.id, one.version) for one in saves.variables] == [("v", 1)]
    assert counted(way, "trace") == {**TRACE, ("session", "parsed"): 1, ("session", "serialized"): 1}


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_increments_go_on_as_a_worker_sent_them(bench: Bench, way: Way) -> None:
    source = "kept = [].save()\nfor step in tracer.iter[:]:\n    kept.append(model.samples.output.item())"
    trace = trace_of(bench, Block([5, 6], source))
    trace.stream = True
    trace.sampling.add(name="max_tokens", value=Value(integer=3))
    events = await way.submit(trace)
    told = [str(event.WhichOneof("kind")) for event in events]
    assert told == ["accepted", *["increment", "output"] * 2, *["increment"] * 2, "output", "accounting", "done"]
    assert way.counts.messages["worker", "session"] == 3  # one for each step; the last comes with the request's end
    assert counted(way, "event")["worker", "serialized"] == 3 + 2
    assert counted(way, "event")["session", "serialized"] == 1


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_the_ingress_refuses_bytes_that_are_no_trace(bench: Bench, way: Way) -> None:
    refused = await way.refusal(service_pb2.UnparsedSubmit(protocol=1, session_id="s", trace=b"\xff"))
    assert refused.code == pb.ERROR_CODE_INVALID_ARGUMENT and "not a valid interpose.v1.Trace" in refused.message


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_a_trace_that_a_worker_cannot_take_is_refused(
    bench: Bench, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(shipment: object) -> Opened:
        raise MemoryError("no room")

    monkeypatch.setattr(Opened, "of", full)
    trace = trace_of(bench, Block([5, 6], "a = 1"), Block([5, 7], "b = 2"))
    refused = await way.refusal(service_pb2.SubmitRequest(protocol=1, session_id="s", trace=trace))
    assert refused.code == pb.ERROR_CODE_ENGINE and "could not take the trace: MemoryError: no room" in refused.message
    assert bench.engine.interleaver.idle


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_a_trace_whose_requests_never_come_leaves_nothing(bench: Bench, way: Way) -> None:
    """It is given up while the workers have it and no request has come."""
    trace = trace_of(bench, Block([5, 6], "a = 1"), Block([5, 7], "b = 2"))
    running = asyncio.ensure_future(anext(way.engine.run(request_of(trace))))
    while bench.engine.interleaver.idle:
        await asyncio.sleep(0)
    assert not bench.engine.llm.llm_engine.has_unfinished_requests()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert bench.engine.interleaver.idle


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
def test_a_request_without_its_trace_fails(bench: Bench) -> None:
    interleaver = bench.engine.interleaver
    interleaver.admit("r", InvokeRequest("nowhere", 0), 1, 0)
    assert interleaver.take_ended() == {"r": Ended.FAILED}
    how, events, _ = interleaver.finish("nowhere", 0, Result())
    assert how is Ended.FAILED and "given up" in pb.Event.FromString(events[0]).failed.message
    assert interleaver.idle


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_an_event_that_changes_on_the_way_is_serialized_again(bench: Bench, way: Way) -> None:
    """A failure names the trace as the client knows it."""
    trace = trace_of(bench, Block([5, 6], "1 / 0"))
    events = await way.submit(trace)
    [failed] = [event.failed for event in events if event.HasField("failed")]
    assert failed.trace_id == trace.id and failed.exception_type == "ZeroDivisionError"
    assert counted(way, "event")["session", "serialized"] == 2


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_a_trace_that_is_aborted_leaves_the_others_of_its_call(bench: Bench, way: Way) -> None:
    traces = [trace_of(bench, Block([5, 6 + number], "n = 1")) for number in range(2)]
    for trace in traces:
        trace.sampling.add(name="max_tokens", value=Value(integer=20))
    requests = [request_of(trace) for trace in traces]
    kinds_of: dict[int, list[str]] = {0: [], 1: []}
    ends: dict[int, bytes] = {}
    async with contextlib.aclosing(way.replica.run_all(requests)) as items:
        async for some in items:
            for number, data, end in some:
                if end is not None:
                    ends[number] = end
                elif kinds_of[number] or data != b"r":
                    kinds_of[number].extend(kind_of(event) for event in apart(data))
                elif number == 0:
                    await way.replica.abort(requests[0].key)
    assert not kinds_of[0] and set(kinds_of[1]) == {"output", "accounting"}
    assert pb.Failure.FromString(ends[0]).code == pb.ERROR_CODE_CANCELLED and ends[1] == b""
    assert bench.engine.interleaver.idle


@pytest.mark.parametrize("bench", ["llama"], indirect=True)
async def test_a_prompt_comes_from_the_cache(bench: Bench, way: Way) -> None:
    """The engine reads off a block's text whether that is right; a text that does not compile says nothing."""
    ids, other = ([start + 37 * i % 480 for i in range(200)] for start in (5, 6))

    async def cached(*sources: str, prompt: list[int] = ids) -> list[int]:
        events = await way.submit(trace_of(bench, *(Block(prompt, source) for source in sources)))
        assert not any(event.HasField("failed") for event in events)
        return [event.accounting.cached_tokens for event in events if event.HasField("accounting")]

    assert await cached("x = model.logits.output.save()") == [0]
    assert await cached("x = model.logits.output.save()", "r = tracer.result") == [128, 128]
    assert await cached("x = model.model.layers[0].mlp.output.sum().save()") == [0]
    assert await cached("x = model.blocks[0].resid_post[-1].save()") == [128]
    assert await cached("x = model.model.layers[0].mlp.output[-80:].sum().save()") == [0]
    status, _, data = await way.http("POST", "/v1/completions", json.dumps({"model": "m", "prompt": other}).encode())
    assert status == 200, data
    assert await cached("x = model.logits.output.save()", prompt=other) == [128]
    trace = trace_of(bench, Block(ids, ""))
    trace.invokes[0].program.source = "x = = 1\n"
    assert not may_use_prefix(trace, 0, compile_here(units_of(trace)), bench.engine.llm.llm_engine.vllm_config)
