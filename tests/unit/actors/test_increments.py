"""Increments of a streamed trace go on with the output of their step, in order, however the two paths interleave."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from actors import arrivals
from actors.dues import Dues
from actors.increments import Arrived, Increments
from actors.protocol import Terms
from actors.session_store import SessionStore
from actors.trace_run import TraceRun
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest
from tests.unit.actors.local_directory import LocalDirectory
from tests.unit.actors.reading import events_of


def increment(sequence: int, steps: int, invoke: int = 0, last: bool = False) -> pb.Increment:
    return pb.Increment(invoke=invoke, sequence=sequence, steps=steps, last=last)


def arrived(made: pb.Increment) -> Arrived:
    return Arrived(made, pb.Event(increment=made).SerializeToString())


def request() -> TraceRequest:
    trace = pb.Trace(id="t", stream=True, invokes=[pb.Invoke()])
    accepted = pb.Event(accepted=pb.Accepted()).SerializeToString()
    return TraceRequest(
        trace.SerializeToString(), key="key", trace_id="t", accepted=accepted, max_saved_bytes=1 << 20, stream=True
    )


def output(tokens: int, invoke: int = 0, finished: bool = False) -> pb.Event:
    return pb.Event(output=pb.Output(invoke=invoke, token_ids=[7] * tokens, finished=finished))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_output_takes_what_its_steps_saved(order: tuple[int, ...]) -> None:
    increments = Increments()
    taken = []
    for sequence in order:
        increments.add(arrived(increment(sequence, sequence + 1)))
    for _ in range(3):
        increments.generated(output(1).output)
        assert increments.complete(0)
        taken.append([one.increment.sequence for one in increments.take(0)])
    assert taken == [[0], [1], [2]]


def test_an_output_waits_for_the_increment_of_its_last_step() -> None:
    increments = Increments()
    increments.generated(output(2).output)
    increments.add(arrived(increment(1, 2)))
    assert not increments.complete(0)
    increments.add(arrived(increment(0, 1)))
    assert increments.complete(0)
    assert [one.increment.sequence for one in increments.take(0)] == [0, 1]
    increments.generated(output(0).output)  # text alone
    assert increments.complete(0) and not increments.take(0)
    increments.generated(output(1).output)
    assert not increments.complete(0)


def test_after_its_last_increment_an_invoke_is_waited_for_no_more() -> None:
    increments = Increments()
    increments.add(arrived(increment(0, 1, last=True)))
    for _ in range(3):
        increments.generated(output(1).output)
        assert increments.complete(0)
        increments.take(0)
    increments.generated(output(1, invoke=1).output)
    assert not increments.complete(1)


def free() -> Dues:
    """The dues of a session without quotas."""
    return Dues(None, SessionStore("s", False, Terms(600.0, 1 << 20, 900.0), None))


async def test_a_trace_records_increments_before_their_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TraceRun(request(), free(), LocalDirectory().keep.remote)

    async def engine(request: TraceRequest):  # type: ignore[no-untyped-def]
        await run.increment(arrived(increment(1, 2)).event)  # a step ahead
        await run.increment(arrived(increment(0, 1)).event)
        yield output(1).SerializeToString()
        yield output(1).SerializeToString()
        await run.increment(arrived(increment(2, 3)).event)
        yield pb.Event(increment=increment(3, 3, last=True)).SerializeToString()
        yield output(1, finished=True).SerializeToString()

    run.start(engine)
    events = await events_of(run.event_log.follow())
    told = [
        (
            event.WhichOneof("kind"),
            event.increment.sequence if event.HasField("increment") else len(event.output.token_ids),
        )
        for event in events
    ]
    assert told == [
        ("accepted", 0), ("increment", 0), ("output", 1), ("increment", 1), ("output", 1), ("increment", 2), ("increment", 3),
        ("output", 1), ("done", 0),
    ]  # fmt: skip


async def test_an_increment_that_never_comes_ends_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "ADOPTION_SECONDS", 0.05)
    run = TraceRun(request(), free(), LocalDirectory().keep.remote)

    async def engine(request: TraceRequest):  # type: ignore[no-untyped-def]
        yield output(1).SerializeToString()

    run.start(engine)
    with pytest.raises(Exception, match="what a block saved did not arrive"):
        async for _ in run.event_log.follow():
            pass
    assert run.event_log.failure is not None and run.event_log.failure.code == pb.ERROR_CODE_UNAVAILABLE


def test_numbers_of_invokes_are_their_own() -> None:
    increments = Increments()
    for invoke in np.random.default_rng(0).permutation(4).tolist():
        increments.add(arrived(increment(0, 1, invoke)))
        increments.generated(output(1, invoke).output)
        assert increments.complete(invoke)
        assert [one.increment.invoke for one in increments.take_all(invoke)] == [invoke]
