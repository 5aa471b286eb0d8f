"""Messages between a worker and one sandboxed process.

The small parts go through a socket, the large ones through shared memory. A message is a head and a body
(`executor.sandbox.codec`). The head has the body's length, the kind of the message and a number that counts the worker's
questions. The process answers each question with notices and one answer, under the question's number.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
from typing import Any

import torch

from executor.sandbox.codec import Malformed, Region, decode, decode_turn, encode
from executor.sandbox.spare import look

REGION_BYTES = 256 << 20  # each way; pages that nobody touches take no memory
MOST_BODY = 4 << 20  # bytes of a body
MOST_NUMBER = (1 << 32) - 1  # of the messages that were sent
HEAD = struct.Struct("<IBI")
_NUMBERS = 64  # bytes at the end of each way
_READ = 1 << 16  # bytes that are read at a time


class Kind(enum.IntEnum):
    """The kinds of messages.

    Members:
        OPEN: blocks of the trace: bind their names.
        START, SERVE, RESUME, THROW: a turn of a block, as of `executor.block.runner.Runner`.
        SAVES: encode what a block saved.
        SHARED: encode what the trace gives back.
        STREAM: encode what is new since the step before.
        SETTLE: tell what a block changed at the location that the model leaves.
        RECORD: a value that a block has recorded.
        CANCEL: end a block.
        LEAVE: drop an ended block.
        PLAN: a plan of the loop where a block waits, as plain values (`executor.plan.tell`).
        LAND: what the steps of a plan left a block.
        GO: go on: a notice has been taken.
        ANSWER: the answer to a question.
        LOG: printed text.
        PIECE: a part of a blob; it is answered with GO.
        INCREMENT: an event of a streamed trace.
        BLOB: asks for a part of an uploaded value; it is answered with GO.
        CHOOSE: asks which experts a router chooses; it is answered with GO.
    """

    OPEN = 1
    START = 2
    SERVE = 3
    RESUME = 4
    THROW = 5
    SAVES = 6
    SHARED = 7
    STREAM = 8
    GO = 9
    SETTLE = 10
    RECORD = 11
    CANCEL = 12
    LEAVE = 13
    PLAN = 14
    LAND = 15
    ANSWER = 16
    LOG = 17
    PIECE = 18
    INCREMENT = 19
    BLOB = 20
    CHOOSE = 21


TURNS = frozenset((Kind.START, Kind.SERVE, Kind.RESUME, Kind.THROW))


class Shared:
    """The memory that a worker and one sandboxed process share.

    Args:
        descriptor: of the memory; the caller may close it afterwards.

    Attributes:
        down, up: what the worker writes, and what the process writes.
        sent_down, sent_up: how many messages each of them has sent, modulo 2^32; a single item.
        waits_awake: whether the process looks for a message before it sleeps; a single item, which the worker writes.
    """

    def __init__(self, descriptor: int) -> None:
        self._mapped = mmap.mmap(descriptor, 2 * REGION_BYTES)
        memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.down = Region(memory[: REGION_BYTES - _NUMBERS])
        self.up = Region(memory[REGION_BYTES : 2 * REGION_BYTES - _NUMBERS])
        numbers = memoryview(self._mapped).cast("I")
        down, up = (REGION_BYTES - _NUMBERS) // 4, (2 * REGION_BYTES - _NUMBERS) // 4
        self.sent_down, self.sent_up = numbers[down : down + 1], numbers[up : up + 1]
        self.waits_awake = numbers[down + 1 : down + 2]


class ChildEnd:
    """The sandboxed process's end of the channel.

    Args:
        socket: its descriptor.
        shared: the memory.
    """

    def __init__(self, socket: int, shared: Shared) -> None:
        self._socket = socket
        self._shared = shared
        self._number = 0
        self._taken = 0  # messages that have come
        self._came = bytearray()  # what has been read of messages to come

    def next(self) -> tuple[Kind, Any]:
        """Return the next message of the worker.

        Raises:
            EOFError: the worker is gone.
        """
        if self._shared.waits_awake[0]:
            look(self._shared.sent_down, self._taken)
        self._taken = (self._taken + 1) & MOST_NUMBER
        size, kind, self._number = HEAD.unpack(self._read(HEAD.size))
        asked, data = Kind(kind), self._read(size)
        return asked, (decode_turn if asked in TURNS else decode)(data, self._shared.down)

    def send(self, kind: Kind, value: Any) -> None:
        """Send an answer or a notice."""
        body = encode(value, self._shared.up)
        if len(body) > MOST_BODY:
            raise Malformed(f"a message of {len(body)} bytes")
        data = memoryview(HEAD.pack(len(body), kind, self._number) + body)
        while data:
            data = data[os.write(self._socket, data) :]
        self._shared.sent_up[0] = (self._shared.sent_up[0] + 1) & MOST_NUMBER

    def rehearse(self, value: Any) -> None:
        """Make a message, and send nothing."""
        decode(encode(value, self._shared.down), self._shared.down)

    def _read(self, size: int) -> bytes:
        came = self._came
        while len(came) < size:
            part = os.read(self._socket, _READ)
            if not part:
                raise EOFError
            came += part
        data = bytes(came[:size])
        del came[:size]
        return data
