"""A process that says what no block says: its invoke fails with a typed error, and nothing else happens."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from executor.block.mediator import Mediator
from executor.core.ended import Ended
from executor.core.location import Kind as At
from executor.core.request import Opened
from executor.model.apply import Applier
from executor.model.layouts import WHOLE
from executor.model.rows import Rows
from executor.model.values import Served
from executor.parallel.agreement import Alone
from executor.sandbox.channel import HEAD, REGION_BYTES, ChildEnd, Kind, Shared
from executor.sandbox.codec import Malformed, Region, decode, encode
from executor.sandbox.process import Process
from executor.sandbox.runner import SandboxRunner
from executor.sandbox.trace import SandboxedTrace, Terms
from executor.saves.collect import Limits
from interpose.v1 import trace_pb2 as pb
from tests.unit.executor.block.parts import driven, state
from tests.unit.executor.sandbox.parts import ROWS, WIDTH, tree

TREE = tree()
ANSWER: dict[str, Any] = {
    "waits": ("layers.0.linear", "output", 0, ""),
    "barrier": None,
    "asked": False,
    "call": None,
    "ended": None,
    "failure": None,
    "changed": {},
    "value": None,
    "misfit": None,
    "skips": [],
    "recorders": [],
}
DONE = {**ANSWER, "waits": None, "ended": "done"}


class Liar:
    """A process's end of the channel, in a thread of the test; a child of the test stands for the process.

    Attributes:
        process: the worker's end.
        end: the other end.
        zygote: a process that stands for the zygote.
    """

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        memory = os.memfd_create("interpose-test")
        os.ftruncate(memory, 2 * REGION_BYTES)
        self._theirs = theirs
        self._child = os.fork()
        if not self._child:
            while True:
                threading.Event().wait(60)
        self.end = ChildEnd(theirs.fileno(), Shared(memory))
        self.zygote = subprocess.Popen(["sleep", "3600"])
        self.process = Process(mine, memory, os.pidfd_open(self._child), self._child, self.zygote)
        self._thread = threading.Thread(target=lambda: None)

    def answers(self, say: Callable[[ChildEnd], object]) -> None:
        """Have the next question answered by `say`."""

        def answer() -> None:
            self.end.next()
            say(self.end)

        self._thread = threading.Thread(target=answer)
        self._thread.start()

    def raw(self, data: bytes) -> None:
        """Have the next question answered by bytes."""
        self.answers(lambda end: self._theirs.sendall(data))

    def close(self) -> None:
        self._thread.join()
        self.process.end()
        os.waitpid(self._child, 0)
        self._theirs.close()
        self.zygote.kill()
        self.zygote.wait()


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()


def block(liar: Liar) -> Mediator:
    """Return a block whose process is the liar."""
    nothing: Any = None
    terms = Terms(1.0, 1 << 28, Limits(1 << 10, 1 << 20), nothing, nothing, nothing)
    trace = SandboxedTrace(
        Opened(pb.Trace(id="trace", invokes=[pb.Invoke()]), "", None), liar.process, Alone(), terms, 0
    )
    of = state()
    return driven(of, SandboxRunner(of, trace, TREE, cast(Applier, nothing)))


def fails(mediator: Mediator) -> pb.Failure:
    """Return the failure of a block that has failed, whose process is ended."""
    ending = mediator.state.ending
    assert ending.ended is Ended.FAILED and ending.failure is not None
    assert (ending.failure.code, ending.failure.trace_id) == (pb.ERROR_CODE_INTERVENTION, "trace")
    return ending.failure


LIES: dict[str, Any] = {
    "nothing": None,
    "a list": [1],
    "too little": {"waits": None},
    "too much": {**ANSWER, "more": 1},
    "no location": {**ANSWER, "waits": None},
    "a location that is none": {**ANSWER, "waits": ("layers.7", "output", 0, "")},
    "a kind that is none": {**ANSWER, "waits": ("layers.0", "weights", 0, "")},
    "a barrier": {**ANSWER, "waits": ("", "barrier", 0, "")},
    "a step that has passed": {**ANSWER, "waits": ("", "step", 0, "")},
    "a step below zero": {**ANSWER, "waits": ("layers.0", "output", -1, "")},
    "a step of another type": {**ANSWER, "waits": ("layers.0", "output", "0", "")},
    "a path without an end": {**ANSWER, "waits": ("x" * 5000, "output", 0, "")},
    "a list of modules": {**ANSWER, "waits": ("layers", "output", 0, "")},
    "an ending that there is not": {**DONE, "ended": "well"},
    "a failure without a failure": {**DONE, "ended": "failed"},
    "a failure that is none": {**DONE, "ended": "failed", "failure": b"\xff\xff\xff"},
    "an ending with a failure": {**DONE, "failure": b""},
    "a change before a value": {**DONE, "changed": {0: torch.ones(1)}},
    "a misfit before a value": {**DONE, "misfit": ("Refusal", 4, "x", "", [])},
    "a skip of nothing": {**ANSWER, "skips": [("layers.9", 0, -1)]},
    "a skip that is none": {**ANSWER, "skips": ["layers.0"]},
    "a call of nothing": {**ANSWER, "waits": None, "call": ("apply", "layers.9", [], {})},
    "a call that is none": {**ANSWER, "waits": None, "call": ("run", "layers.0", [], {})},
    "a weight that is none": {**ANSWER, "waits": None, "call": ("weight", "layers.0.linear", "gone", None)},
}


@pytest.mark.parametrize("name", LIES)
def test_an_answer_that_no_block_gives_fails_the_invoke(liar: Liar, name: str) -> None:
    mediator = block(liar)
    liar.answers(lambda end: end.send(Kind.ANSWER, LIES[name]))
    mediator.start()
    assert "the sandboxed process of the block was ended" in fails(mediator).message
    assert not liar.process.open


SERVED_LIES: dict[str, Any] = {
    "a tensor that is none": {"changed": {1: torch.ones(ROWS, WIDTH)}},
    "a tensor of another type": {"changed": {0: [1.0]}},
    "a number of another type": {"changed": {"0": torch.ones(ROWS, WIDTH)}},
    "no changes": {"changed": [torch.ones(ROWS, WIDTH)]},
    "a leaf that is none": {"value": ("leaf", 5)},
    "containers that are none": {"value": ["leaf", 0]},
    "a tag that is none": {"value": ("object", 0)},
    "a misfit that is none": {"misfit": ("SystemExit", 0, "", "", [])},
}


def given(mediator: Mediator, liar: Liar) -> Served:
    """Serve a block its first location, [rows, width]."""
    liar.answers(lambda end: end.send(Kind.ANSWER, ANSWER))
    mediator.start()
    at = mediator.state.waits.location
    assert at is not None and at.kind == At.OUTPUT
    value = torch.zeros(ROWS + 1, WIDTH)
    served = Served(str(at), value, Rows(0, ROWS, ROWS + 1, ROWS + 1), lambda path: WHOLE)
    return served


@pytest.mark.parametrize("name", SERVED_LIES)
def test_a_change_that_is_none_fails_the_invoke(liar: Liar, name: str) -> None:
    mediator = block(liar)
    served = given(mediator, liar)
    liar.answers(lambda end: end.send(Kind.ANSWER, {**DONE, **SERVED_LIES[name]}))
    at = mediator.state.waits.location
    assert at is not None
    mediator.serve(served, at, TREE.order_of(at.path, at.kind))
    fails(mediator)


@pytest.mark.parametrize("shape", [(ROWS, WIDTH + 1), (ROWS + 1, WIDTH), (1,), (ROWS * WIDTH,)])
@pytest.mark.parametrize("whole", [False, True])
def test_rows_of_another_shape_are_refused_where_they_would_be_written(
    liar: Liar, shape: tuple[int, ...], whole: bool
) -> None:
    mediator = block(liar)
    served = given(mediator, liar)
    lie = {"value": ("new", torch.ones(shape))} if whole else {"changed": {0: torch.ones(shape)}}
    liar.answers(lambda end: end.send(Kind.ANSWER, {**DONE, **lie}))
    at = mediator.state.waits.location
    assert at is not None
    mediator.serve(served, at, TREE.order_of(at.path, at.kind))
    with pytest.raises(Exception, match="shape"):
        served.settle(torch.zeros(ROWS + 1, WIDTH))


RAW = {
    "garbage": b"\xff" * 64,
    "a message without an end": HEAD.pack(1 << 31, Kind.ANSWER, 1),
    "another question's answer": HEAD.pack(1, Kind.ANSWER, 7) + b"N",
    "a kind that is none": HEAD.pack(1, 99, 1) + b"N",
    "a question": HEAD.pack(1, Kind.START, 1) + b"N",
    "a blob under another name": b"",
    "a list without an end": HEAD.pack(5, Kind.ANSWER, 1) + b"l" + struct.pack("<I", 1 << 30),
    "bytes that lie nowhere": HEAD.pack(18, Kind.ANSWER, 1) + b"b+" + struct.pack("<QQ", 1 << 40, 1 << 20),
}


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_no_message_fail_the_invoke(liar: Liar, name: str) -> None:
    mediator = block(liar)
    if RAW[name]:
        liar.raw(RAW[name])
    else:
        liar.answers(lambda end: end.send(Kind.PIECE, ("other/0/1", 1, b"x")))
    mediator.start()
    fails(mediator)


def test_a_process_that_is_silent_is_ended(liar: Liar) -> None:
    mediator = block(liar)
    liar.answers(lambda end: None)
    mediator.start()
    failure = mediator.state.ending.failure
    assert failure is not None and failure.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
    assert not liar.process.open


def test_a_process_that_is_killed_fails_its_invoke(liar: Liar) -> None:
    mediator = block(liar)
    liar.answers(lambda end: liar._theirs.shutdown(socket.SHUT_RDWR))
    mediator.start()
    assert "ended from within" in fails(mediator).message


def region() -> Region:
    return Region(torch.zeros(1 << 16, dtype=torch.uint8))


VALUES: list[Any] = [
    None,
    True,
    -5,
    1 << 200,
    2.5,
    1 + 2j,
    "text \ud800",
    b"bytes",
    "x" * 10_000,
    [1, (2, [3])],
    {"a": {1: None}, 2: (b"",)},
    torch.arange(12).view(3, 4).t(),
    torch.ones(2, 3, dtype=torch.bfloat16),
    torch.zeros(0, 4),
    torch.tensor([True, False]),
    torch.tensor(3.5),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:20])
def test_a_value_comes_as_it_went(value: Any) -> None:
    memory = region()
    came = decode(encode(value, memory), memory)
    if isinstance(value, torch.Tensor):
        assert came.dtype == value.dtype and torch.equal(came, value)
    else:
        assert (type(came), came) == (type(value), value)


def test_no_bytes_of_any_kind_do_more_than_be_refused() -> None:
    memory, draw = region(), random.Random(5)
    real = [encode(value, memory) for value in VALUES]
    refused = 0
    for _ in range(20_000):
        data = bytearray(draw.choice(real))
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            decode(bytes(data[: draw.randrange(1, len(data) + 1)]), memory)
        except Malformed:
            refused += 1
    assert refused > 5_000


def test_a_process_that_talks_all_the_time_is_ended(liar: Liar) -> None:
    mediator = block(liar)

    def talk(end: ChildEnd) -> None:
        with contextlib.suppress(OSError):
            while True:
                end.send(Kind.LOG, (mediator.identity.request_id, "x"))

    liar.answers(talk)
    mediator.start()
    ending = mediator.state.ending
    assert ending.failure is not None and not liar.process.open
    assert ending.failure.code == pb.ERROR_CODE_DEADLINE_EXCEEDED


def test_a_process_that_sends_a_blob_bit_by_bit_is_ended(liar: Liar) -> None:
    mediator = block(liar)

    def trickle(end: ChildEnd) -> None:
        with contextlib.suppress(OSError, EOFError):
            for _ in range(1000):
                end.send(Kind.PIECE, ("trace/0/0", 1 << 19, b"x"))
                end.next()
                threading.Event().wait(0.05)

    liar.answers(trickle)
    mediator.start()
    ending = mediator.state.ending
    assert ending.failure is not None and ending.failure.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
