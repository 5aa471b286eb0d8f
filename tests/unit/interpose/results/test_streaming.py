"""A streamed trace in the notebook: outputs as they come, saves put together from increments, and every way to leave."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import numpy as np
import pytest

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.rpc.reader import AHEAD
from interpose.v1 import trace_pb2 as pb
from interpose.v1 import value_pb2
from interpose.wire.encoder import Encoder
from tests.unit.interpose.conftest import numbers


class Increments:
    """Makes the increments of one invoke; large arrays become blobs to fetch."""

    def __init__(self, service, invoke: int = 0) -> None:
        self._service = service
        self._invoke = invoke
        self._sequence = 0
        self.encoder = Encoder(inline_bytes=256, put_blob=self._put)

    def _put(self, data: memoryview) -> str:
        blob_id = f"blob/{len(self._service.blobs)}"
        self._service.blobs[blob_id] = bytes(data)
        return blob_id

    def __call__(self, *patches: pb.Patch, captured=None, dropped=(), first: int | None = None, **names) -> pb.Event:
        table = self.encoder.objects.values
        first = len(table) if first is None else first
        increment = pb.Increment(invoke=self._invoke, sequence=self._sequence, dropped=dropped, patches=patches)
        increment.first = first
        self._sequence += 1
        for name, value in names.items():
            increment.names.add(name=name, value=self.encoder.encode(value))
        for index, entry in (captured or {}).items():
            increment.captured.add(index=index, entry=entry)
        increment.objects.values.extend(table[first:])
        return pb.Event(increment=increment)


def output(text: str, token: int, invoke: int = 0, finished: bool = False, reason: str = "") -> pb.Event:
    return pb.Event(
        output=pb.Output(invoke=invoke, text=text, token_ids=[token], finished=finished, finish_reason=reason)
    )


def appended(index: int, keep: int, *items: value_pb2.Value) -> pb.Patch:
    return pb.Patch(index=index, list=pb.ListPatch(keep=keep, items=items))


def three_rows(service, trace):
    """Three steps, each of which saves one row; the second row is large."""
    increments = Increments(service)
    yield increments(rows=[numbers(3)], n=1)
    yield output("a", 1)
    first = len(increments.encoder.objects.values)
    row = increments.encoder.encode(numbers(1000))
    yield increments(appended(0, 1, row), first=first, n=2)
    yield output("b", 2)
    first = len(increments.encoder.objects.values)
    row = increments.encoder.encode(numbers(5))
    yield increments(appended(0, 2, row), first=first, n=3, word="x")
    yield output("c", 3, finished=True, reason="length")


def test_outputs_and_saves_so_far(service, model):
    service.script = three_rows
    rows = "before"
    with model.trace("Hello", max_tokens=3, stream=True) as tracer:
        rows = [].save()
        n, word = 0, ""
    assert service.traces[0].stream and rows == "before"
    with pytest.raises(interpose.InvalidArgument, match="read to its end"):
        tracer.result
    seen = []
    for out in tracer.stream():
        seen.append((out.text, out.new_text, out.token_ids, out.new_token_ids, out.finished, out.finish_reason))
        assert out.saves["n"] == len(out.saves["rows"]) == len(out.token_ids) and out.invoke == 0
        assert rows == "before", "the caller's names are assigned at the end"
    assert seen == [
        ("a", "a", [1], [1], False, ""),
        ("ab", "b", [1, 2], [2], False, ""),
        ("abc", "c", [1, 2, 3], [3], True, "length"),
    ]
    assert [len(row) for row in rows] == [3, 1000, 5] and n == 3 and word == "x"
    assert np.array_equal(np.asarray(rows[1]), numbers(1000))
    assert tracer.result.text == "abc" and tracer.usage.prompt_tokens == 2
    assert list(tracer.stream()) == [] and not service.cancelled


def test_each_output_has_a_dict_of_its_own(service, model):
    service.script = three_rows
    with model.trace("Hello", stream=True) as tracer:
        n = 0
    outs = list(tracer.stream())
    assert [out.saves["n"] for out in outs] == [1, 2, 3] and n == 3


def test_async_for(service, model):
    service.script = three_rows
    with model.trace("Hello", stream=True) as tracer:
        rows = []

    async def read():
        return [(out.text, len(out.saves["rows"])) async for out in tracer.stream()]

    assert asyncio.run(read()) == [("a", 1), ("ab", 2), ("abc", 3)]
    assert [len(row) for row in rows] == [3, 1000, 5]


def test_everything_that_a_patch_can_change(service, model):
    total = numbers(4)

    def script(service, trace):
        increments = Increments(service)
        d, s, nested = {"a": 1, "b": [1]}, {1, 2}, [5, 6, 7]
        yield increments(d=d, s=s, nested=nested, total=total, gone=1)
        yield output("a", 1)
        encode = increments.encoder.encode
        table = {id(value): index for index, value in increments.encoder.entries().items()}
        array = increments.encoder.array(total + 1).tensor
        change = pb.DictPatch(removed=[encode("a")])
        change.changed.keys.extend([encode("c"), encode("b")])
        change.changed.values.extend([encode(3), encode(nested)])
        yield increments(
            pb.Patch(index=table[id(d)], dict=change),
            pb.Patch(index=table[id(s)], set=pb.SetPatch(removed=[encode(1)], added=[encode(9)])),
            appended(table[id(nested)], 1, encode(8), encode(d)),
            pb.Patch(index=table[id(total)], tensor=array),
            dropped=["gone"],
        )
        yield output("b", 2, finished=True)

    service.script = script
    gone = "mine"
    with model.trace("Hello", stream=True) as tracer:
        d = s = nested = gone = 0
    first, second = tracer.stream()
    assert first.saves["gone"] == 1 and "gone" not in second.saves and gone == "mine"
    assert d["c"] == 3 and d["b"] is nested and "a" not in d and s == {2, 9}
    assert nested[:2] == [5, 8] and nested[2] is d
    assert np.array_equal(np.asarray(second.saves["total"]), numbers(4) + 1)
    assert first.saves["d"] is second.saves["d"] is d


def test_the_callers_own_list_grows(service, model):
    rows = ["old"]

    def script(service, trace):
        increments = Increments(service)
        index = next(i for i, value in enumerate(trace.scope.values) if value.HasField("list"))
        yield increments(rows=["old", 1], captured={index: 0})
        yield output("a", 1)
        yield increments(appended(0, 2, increments.encoder.encode(2)))
        yield output("b", 2, finished=True)

    service.script = script
    with model.trace("Hello", stream=True) as tracer:
        rows.append(1)
    seen = [(list(rows), out.saves["rows"] is rows) for out in tracer.stream()]
    assert seen == [(["old", 1], True), (["old", 1, 2], True)] and rows == ["old", 1, 2]


def test_several_prompts(service, model):
    def script(service, trace):
        both = [Increments(service, 0), Increments(service, 1)]
        for invoke in (1, 0):
            yield both[invoke](x=invoke)
            yield output("ab"[invoke], 1, invoke, finished=True)
        yield service.saves(-1, {0: [5]}, count=2)

    service.script = script
    with model.trace(stream=True) as tracer:
        found = [].save()
        count = interpose.save(0)
        for prompt in "ab":
            with tracer.invoke(prompt) as one:
                x = found
                count += 1
    assert [(out.invoke, out.saves) for out in tracer.stream()] == [(1, {"x": 1}), (0, {"x": 0})]
    assert x == 1 and found == [5] and count == 2 and one.result.text == "b"


def test_an_error_comes_after_what_came_before(service, model):
    def script(service, trace):
        yield Increments(service)(x=1)
        yield output("a", 1, finished=True, reason="error")
        yield pb.Event(failed=pb.Failure(code=pb.ERROR_CODE_INTERVENTION, message="ValueError: boom"))

    service.script = script
    x = 0
    with model.trace("Hello", stream=True) as tracer:
        x = 1
    seen = []
    with pytest.raises(interpose.InterventionError, match="boom"):
        for out in tracer.stream():
            seen.append((out.saves, out.finish_reason))
    assert seen == [({"x": 1}, "error")] and x == 0
    assert tracer.result.text == "a"


def test_a_trace_that_fails_as_a_whole(service, model):
    def script(service, trace):
        yield output("a", 1)
        raise ServiceFailure(failure(pb.ERROR_CODE_UNAVAILABLE, "the engine stopped"))

    service.script = script
    with model.trace("Hello", stream=True) as tracer:
        x = 1
    stream = tracer.stream()
    assert next(stream).text == "a"
    with pytest.raises(interpose.Unavailable, match="the engine stopped") as caught:
        next(stream)
    assert caught.value.trace_id == tracer.id


def test_a_refusal_is_raised_by_the_block(service, model):
    service.refusals["Submit"] = [ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, "too many"))]
    with pytest.raises(interpose.QuotaExceeded):
        with model.trace("Hello", stream=True):
            x = 1


def test_an_increment_that_makes_no_sense(service, model):
    def script(service, trace):
        yield pb.Event(increment=pb.Increment(sequence=1))

    service.script = script
    with model.trace("Hello", stream=True) as tracer:
        x = 1
    with pytest.raises(interpose.EngineError, match="where 0 was next"):
        list(tracer.stream())


class Endless:
    """A script that goes on until it is cancelled."""

    def __init__(self, text: str = "x") -> None:
        self.sent = 0
        self._text = text
        self.left = threading.Event()

    def __call__(self, service, trace):
        try:
            while True:
                self.sent += 1
                yield output(self._text, 1)
        finally:
            self.left.set()


def _leave_by_break(tracer):
    for out in tracer.stream():
        if len(out.token_ids) == 3:
            break


def _leave_by_close(tracer):
    with tracer.stream() as stream:
        next(stream)
    with pytest.raises(interpose.Cancelled, match="has been left"):
        next(stream)


def _leave_by_exception(tracer):
    with pytest.raises(KeyError):
        for _ in tracer.stream():
            raise KeyError
    gc.collect()  # the exception's traceback held the loop


def _leave_async(tracer):
    async def read():
        async for _ in tracer.stream():
            break

    asyncio.run(read())


def _leave_by_cancelling_a_task(tracer):
    async def read():
        async for _ in tracer.stream():
            await asyncio.sleep(0)

    async def main():
        task = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


@pytest.mark.parametrize(
    "leave", [_leave_by_break, _leave_by_close, _leave_by_exception, _leave_async, _leave_by_cancelling_a_task]
)
def test_leaving_early_cancels_the_trace(service, model, leave):
    service.script = script = Endless()
    with model.trace("Hello", max_tokens=1000, stream=True) as tracer:
        x = 1
    leave(tracer)
    assert script.left.wait(20)
    deadline = time.monotonic() + 20
    while service.cancelled != [tracer.id] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert service.cancelled == [tracer.id]


def test_a_trace_whose_outputs_nobody_reads_is_cancelled(service, model):
    service.script = script = Endless()

    def run():
        with model.trace("Hello", max_tokens=1000, stream=True):
            x = 1

    run()
    gc.collect()
    assert script.left.wait(20)


def test_a_slow_reader_slows_the_call_down(service, model):
    """What is read ahead is bounded: the sender stops when the reader does."""
    service.script = script = Endless("x" * 100_000)
    with model.trace("Hello", max_tokens=1000, stream=True) as tracer:
        x = 1
    stream = tracer.stream()
    next(stream)
    before, still = -1, 0
    deadline = time.monotonic() + 30
    while still < 10 and time.monotonic() < deadline:  # until the sender has stood still for a second
        still = still + 1 if script.sent == before else 0
        before = script.sent
        time.sleep(0.1)
    assert still == 10 and AHEAD < script.sent < 1000
    for _ in range(2 * AHEAD):
        next(stream)
    stream.close()


@pytest.mark.parametrize("stream", [1, "yes", None])
def test_stream_is_a_bool(model, stream):
    with pytest.raises(interpose.InvalidArgument, match="True or False"):
        model.trace("Hello", stream=stream)


def test_stream_of_a_trace_that_does_not(service, model):
    with model.trace("Hello") as tracer:
        x = 1
    with pytest.raises(interpose.InvalidArgument, match="stream=True"):
        tracer.stream()
    with pytest.raises(interpose.InvalidArgument, match="after its block"):
        model.trace("Hello", stream=True).stream()
