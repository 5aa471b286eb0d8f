"""What a session's traces share: one copy counts, traces take turns at it, and one that fails leaves it as it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import numpy as np
import pytest

from actors.protocol import Route, Terms
from actors.saved import Saved, named
from actors.session import Session
from actors.variables import MAX_VARIABLES, SharedVariables, copies
from interpose.contract.errors import ServiceFailure
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import DTYPE_FLOAT32, Blob, Items, Objects, RemoteTensor, Stack, StackSlice, Tensor, Value
from interpose.wire import views as indexing
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import Encoder
from interpose.wire.request import TraceRequest
from interpose.wire.resolver import Resolver
from tests.unit.actors.reading import events_of
from tests.unit.actors.test_session import ROUTE, Submission, clock, ended, kinds, opened

__all__ = ["clock"]


class Engine:
    """Appends to the list that a trace shares, as `script` says, and fails if it is told to."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.fail = False

    async def run(self, route: Route, request: TraceRequest) -> AsyncGenerator[bytes, None]:
        trace = request.parse()
        [variable] = trace.variables
        decoder = Decoder(trace.scope, get_blob=lambda blob: b"")
        shared = decoder.object(variable.entry)
        self.seen.append(list(shared))
        gate = self.gates.get(trace.model)
        if gate is not None:
            await gate.wait()
        shared.append(trace.model)
        encoder = Encoder(inline_bytes=1 << 20, put_blob=lambda data: "")
        saves = pb.Saves(invoke=-1)
        saves.names.add(name="rows", value=encoder.encode(shared))
        saves.names.add(name="count", value=encoder.encode(3))
        saves.updates.add(index=variable.entry, value=encoder.objects.values[0])
        saves.updates.add(index=variable.entry + 5, value=encoder.objects.values[0])
        saves.objects.CopyFrom(encoder.objects)
        if self.fail:
            yield pb.Event(failed=pb.Failure(code=pb.ERROR_CODE_INTERVENTION, message="boom")).SerializeToString()
        yield pb.Event(saves=saves).SerializeToString()
        yield pb.Event(output=pb.Output(token_ids=[7], finished=True)).SerializeToString()


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def session(engine: Engine) -> Session:
    return await opened(engine, True)


def submission(
    name: str, *, version: int = 0, canonical: bool = False, items: tuple[int, ...] = (), job: bool = True
) -> Submission:
    trace = pb.Trace(id=name, model=name)
    trace.shared.add(name="rows", value=Value(ref=0))
    trace.scope.values.append(
        Value(none=True) if canonical else Value(list=Items(items=[Value(integer=item) for item in items]))
    )
    trace.variables.add(id="v", entry=0, version=version, canonical=canonical)
    accepted = pb.Event(accepted=pb.Accepted(trace_id=name, session_id="s", model=name, invokes=1))
    request = TraceRequest(
        trace.SerializeToString(), session_id="s", trace_id=name, accepted=accepted.SerializeToString(),
        max_saved_bytes=1 << 30, job=job, keep=job, variables=frozenset({"v"}),
    )  # fmt: skip
    return request, ROUTE, {}


async def told(session: Session, trace_id: str) -> pb.Saves | None:
    """What the client is told of the shared scope."""
    events = await events_of(session.attach("s", trace_id, "f"))
    return next((event.saves for event in events if event.WhichOneof("kind") == "saves"), None)


async def test_the_next_trace_sees_what_the_one_before_left(session: Session, engine: Engine) -> None:
    await session.start("s", *submission("a", items=(1,)))
    saves = await told(session, "a")
    assert saves is not None and [(one.id, one.version) for one in saves.variables] == [("v", 1)]
    assert [binding.name for binding in saves.names] == ["count"], "a list that was changed in place keeps its identity"
    assert [update.index for update in saves.updates] == [0], "of what is not the client's it is told nothing"
    await session.start("s", *submission("b", version=1, canonical=True))
    await told(session, "b")
    assert engine.seen == [[1], [1, "a"]]


async def test_traces_that_share_take_turns(session: Session, engine: Engine) -> None:
    engine.gates["a"] = asyncio.Event()
    await session.start("s", *submission("a", items=(1,)))
    await session.start("s", *submission("b", version=0, canonical=True))
    await session.start("s", *submission("c", version=0, canonical=True))
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.seen == [[1]] and (await session.job("s", "c")).state == service_pb2.JOB_STATE_QUEUED
    assert await session.cancel("s", "b")
    engine.gates["a"].set()
    assert (await ended(session, "c")).state == service_pb2.JOB_STATE_DONE
    assert engine.seen == [[1], [1, "a"]], "the one that was cancelled had no turn"


async def test_a_trace_that_fails_leaves_it_as_it_was(session: Session, engine: Engine) -> None:
    await session.start("s", *submission("a", items=(1,)))
    await ended(session, "a")
    engine.fail = True
    await session.start("s", *submission("b", version=1, canonical=True))
    saves = await told(session, "b")
    assert saves is not None and not saves.variables and not saves.updates and not saves.objects.values
    assert [binding.name for binding in saves.names] == ["count"]
    engine.fail = False
    await session.start("s", *submission("c", version=1, canonical=True))
    saves = await told(session, "c")
    assert saves is not None and saves.variables[0].version == 2
    assert engine.seen == [[1], [1, "a"], [1, "a"]]


async def test_a_copy_that_is_not_the_latest_is_refused(session: Session, engine: Engine) -> None:
    await session.start("s", *submission("a", items=(1,)))
    await ended(session, "a")
    await session.start("s", *submission("stale", version=0, items=(1, 2)))
    status = await ended(session, "stale")
    assert status.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT and "wait for that one" in status.failure.message
    await session.start("s", *submission("b", version=1, items=(1, 9)))
    await ended(session, "b")
    await session.start("s", *submission("c", version=2, canonical=True))
    await ended(session, "c")
    assert engine.seen == [[1], [1, 9], [1, 9, "b"]]


async def test_it_goes_with_the_session_and_with_its_time(
    session: Session, engine: Engine, clock: Callable[[float], None]
) -> None:
    await session.start("s", *submission("a", items=(1,)))
    await ended(session, "a")
    assert (await session.describe("s")).stored_bytes > 0
    await session.cancel("s", "a", forget=True)
    assert (await session.describe("s")).stored_bytes > 0, "the trace is forgotten, what it left is not"
    clock(601)
    session.sweep()
    assert (await session.stats()).stored_bytes == 0
    await session.start("s", *submission("b", version=1, canonical=True))
    status = await ended(session, "b")
    assert status.failure.code == pb.ERROR_CODE_NOT_FOUND and "share it anew" in status.failure.message


async def test_a_kept_session_that_is_full_says_so(engine: Engine) -> None:
    session = await opened(engine, True, Terms(600.0, 16 << 10, 900.0))
    items = tuple(range(2_000))
    await session.start("s", *submission("a", items=items))
    await ended(session, "a")
    with pytest.raises(ServiceFailure, match=r"no room for .*; results of jobs and of kept sessions") as caught:
        await session.start("s", *submission("b", items=items))
    assert caught.value.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED
    with pytest.raises(ServiceFailure):
        await kinds(session.run(*submission("c", items=items, job=False), "f"))


def trace(*variables: pb.SessionVariable, values: int = 1) -> pb.Trace:
    made = pb.Trace(id="t", variables=variables)
    made.scope.values.extend([Value(none=True)] * values)
    return made


def tensor(blob_id: str) -> Value:
    return Value(tensor=Tensor(dtype=DTYPE_FLOAT32, shape=[2], blob=Blob(id=blob_id, size=8)))


def test_tables_that_lead_back_to_themselves_and_to_each_other() -> None:
    """Two variables of one table stay connected where they are put, and tensors in them are taken from the session."""
    variables = SharedVariables()
    outer = Value(list=Items(items=[Value(ref=1), Value(ref=0), Value(ref=2)]))
    inner = Value(list=Items(items=[Value(integer=4)]))
    objects = Objects(values=[outer, inner, tensor("k/0/0")])
    saves = pb.Saves(invoke=-1, objects=objects)
    saves.names.add(name="outer", value=Value(ref=0))
    saves.names.add(name="inner", value=Value(ref=1))
    first = trace(pb.SessionVariable(id="o", entry=0), pb.SessionVariable(id="i", entry=1), values=2)
    first.shared.add(name="outer", value=Value(ref=0))
    first.shared.add(name="inner", value=Value(ref=1))
    left = variables.settle(first, saves, 2, failed=False)
    variables.keep(copies(objects, left, {"k/0/0": Saved("the reference", 8)}))
    assert variables.size == objects.ByteSize()

    both = trace(
        pb.SessionVariable(id="i", entry=2, version=1, canonical=True),
        pb.SessionVariable(id="o", entry=0, version=1, canonical=True),
        values=3,
    )
    lent = variables.lend(both)
    assert {name: saved.ref for name, saved in lent.items()} == {"k/0/0": "the reference"}
    remotes = [value.remote for value in both.scope.values if value.WhichOneof("kind") == "remote"]
    assert [(one.blob_id, list(one.view.shape), one.view.dtype) for one in remotes] == [("k/0/0", [2], DTYPE_FLOAT32)]

    class Resolver:
        def remote(self, stayed: object) -> object:
            return np.zeros(2)

    decoder = Decoder(both.scope, get_blob=lambda blob: b"", resolver=Resolver())  # type: ignore[arg-type]
    outer_again, inner_again = decoder.object(0), decoder.object(2)
    assert outer_again[0] is inner_again and outer_again[1] is outer_again and inner_again == [4]


@pytest.mark.parametrize("as_blob", [True, False])
def test_tensors_of_a_stack_are_lent_one_by_one(as_blob: bool) -> None:
    """A variable with a stack goes into the next trace as tensors, each of them once."""
    block = np.arange(6, dtype=np.float32)
    stack = Stack(dtype=DTYPE_FLOAT32, count=3, shape=[1, 2])
    if as_blob:
        stack.blob.CopyFrom(Blob(id="k/0/0", size=24))
    else:
        stack.data = block.tobytes()
    last = Value(stacked=StackSlice(stack=1, first=2, count=1))
    every = Value(stacked=StackSlice(stack=1, first=0, count=3))
    objects = Objects(values=[Value(list=Items(items=[every, last, Value(ref=0)])), Value(stack=stack)])
    saves = pb.Saves(invoke=-1, objects=objects)
    saves.names.add(name="rows", value=Value(ref=0))
    before = saves.SerializeToString()
    assert named(saves)[0] == ({"k/0/0"} if as_blob else set())
    variables = SharedVariables()
    first = trace(pb.SessionVariable(id="v", entry=0))
    first.shared.add(name="rows", value=Value(ref=0))
    left = variables.settle(first, saves, 1, failed=False)
    variables.keep(copies(saves.objects, left, {"k/0/0": Saved("the reference", 24)} if as_blob else {}))
    assert saves.objects.SerializeToString() == pb.Saves.FromString(before).objects.SerializeToString(), (
        "the client's is a stack"
    )

    second = trace(pb.SessionVariable(id="v", entry=1, version=1, canonical=True), values=2)
    assert list(variables.lend(second)) == (["k/0/0"] if as_blob else [])
    assert not {value.WhichOneof("kind") for value in second.scope.values} & {"stack", "stacked"}

    class Held(Resolver):
        def remote(self, tensor: RemoteTensor) -> object:
            assert tensor.blob_id == "k/0/0"
            return indexing.apply(block.view(np.uint8), tensor.view).view(np.float32)

    rows = Decoder(second.scope, get_blob=lambda blob: b"", resolver=Held(), library="numpy").object(1)
    assert [row.tolist() for row in rows[:3]] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert rows[3] is rows[2] and rows[4] is rows and len(rows) == 5


def test_more_than_a_session_keeps() -> None:
    variables = SharedVariables()
    with pytest.raises(ServiceFailure) as caught:
        variables.lend(trace(*(pb.SessionVariable(id=str(i), entry=i) for i in range(MAX_VARIABLES + 1))))
    assert caught.value.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED
