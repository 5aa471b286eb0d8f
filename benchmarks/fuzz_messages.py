"""Messages for `benchmarks.fuzz`: real messages, changed field by field, and garbage.

A change knows the grammar of a message: it takes a field out, repeats it, gives it a number or a text from the edges, nests
it, or puts in the same kind of message from another call.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

_TEXTS = (
    "",
    "\0",
    "a" * 5000,
    "../../etc/passwd",
    "🦕" * 300,
    "\u202e",
    "model",
    "None",
    "-1",
    "sha256:" + "0" * 64,
    "%s%n",
)
_INTEGERS = (
    0,
    1,
    2,
    7,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -1,
    -(1 << 31),
)
_FLOATS = (0.0, -0.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 5e-324, 0.5)
_DEPTHS = (3, 30, 90)
_MOST_BYTES = 200_000
_OPEN = 6  # sessions that were opened last
_LEARNED = 600

_NUMBERS = {
    FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_SFIXED64, FieldDescriptor.TYPE_ENUM,
}  # fmt: skip


class Messages:
    """Makes messages from real ones.

    Args:
        real: real messages of each method, with the class of the method's message.
        seed: of the random changes.
    """

    def __init__(self, real: dict[str, list[Message]], seed: int) -> None:
        self._real = real
        self._random = random.Random(seed)
        self._parts: defaultdict[str, list[Message]] = defaultdict(list)
        self._texts: list[str] = list(_TEXTS)
        self._sessions: deque[str] = deque(maxlen=_OPEN)
        self._bytes: list[bytes] = [b"", b"\xff", bytes(70)]
        for messages in real.values():
            for message in messages:
                self._collect(message)
        self._first = len(self._texts)  # the texts after these come and go

    def message(self, method: str) -> bytes:
        """Return one message for a method."""
        roll = self._random.random()
        if roll < 0.05:
            return self._random.randbytes(self._random.choice((0, 1, 7, 100, 5000)))
        chosen = self._random.choice(self._real[method])
        if roll < 0.12:
            return self._spoiled(chosen.SerializeToString())
        message = type(chosen)()
        message.CopyFrom(chosen)
        self._enliven(message)
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 3, 8))):
            self._change(message)
        if roll < 0.2:
            self._nest(message)
        try:
            data = message.SerializeToString()
        except ValueError:  # a text that is no Unicode any more
            return b""
        return data if len(data) <= _MOST_BYTES else data[:_MOST_BYTES]

    def learn(self, text: str) -> None:
        """Take a text of the service's, as the id of a session, for further messages."""
        if text and text not in self._texts:
            self._texts.append(text)
            if len(self._texts) > self._first + _LEARNED:
                del self._texts[self._first]

    def live(self, session: str) -> None:
        """Take the id of a session that was just opened: most messages are about such sessions."""
        self._sessions.append(session)
        self.learn(session)

    def _enliven(self, message: Any) -> None:
        """Let a message mean an open session, and a trace that no message has brought before."""
        fields = message.DESCRIPTOR.fields_by_name
        if "session_id" in fields and self._sessions and self._random.random() < 0.7:
            message.session_id = self._random.choice(self._sessions)
        if "trace" in fields and self._random.random() < 0.8:
            message.trace.id = f"{self._random.getrandbits(64):x}"
            self.learn(message.trace.id)

    def _collect(self, message: Message) -> None:
        self._parts[message.DESCRIPTOR.full_name].append(message)
        for field, value in message.ListFields():
            for one in value if field.is_repeated else [value]:
                if isinstance(one, Message):
                    self._collect(one)
                elif isinstance(one, str):
                    self._texts.append(one)
                elif isinstance(one, bytes):
                    self._bytes.append(one)

    def _spoiled(self, data: bytes) -> bytes:
        spoiled = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 20))):
            if not spoiled:
                break
            at = self._random.randrange(len(spoiled))
            kind = self._random.randrange(4)
            if kind == 0:
                spoiled[at] ^= 1 << self._random.randrange(8)
            elif kind == 1:
                del spoiled[at:]
            elif kind == 2:
                spoiled[at:at] = b"\xff" * self._random.choice((1, 9, 11))
            else:
                del spoiled[at : at + self._random.randrange(1, 9)]
        return bytes(spoiled)

    def _change(self, message: Message) -> None:
        """Change one field somewhere in a message."""
        part = self._random.choice(list(parts_of(message)))
        there = [field for field, _ in part.ListFields()]
        fields = there if there and self._random.random() < 0.7 else list(part.DESCRIPTOR.fields)
        if not fields:
            return
        field = self._random.choice(fields)
        if self._random.random() < 0.15:
            part.ClearField(field.name)
            return
        if not field.is_repeated:
            self._set(field, part)
            return
        values = getattr(part, field.name)
        if values and self._random.random() < 0.3:
            del values[self._random.randrange(len(values))]
        for _ in range(self._random.choice((1, 1, 2, 40))):
            self._add(field, values)

    def _set(self, field: FieldDescriptor, part: Message) -> None:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            other = self._part(field)
            if other is None:
                getattr(part, field.name).SetInParent()
            else:
                getattr(part, field.name).CopyFrom(other)
        else:
            _tried(lambda value: setattr(part, field.name, value), self._value(field))

    def _add(self, field: FieldDescriptor, values: Any) -> None:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            other = self._part(field)
            added = values.add() if hasattr(values, "add") else None
            if added is not None and other is not None:
                added.CopyFrom(other)
        else:
            _tried(values.append, self._value(field))

    def _part(self, field: FieldDescriptor) -> Message | None:
        found = self._parts.get(field.message_type.full_name)
        return self._random.choice(found) if found else None

    def _value(self, field: FieldDescriptor) -> Any:
        if field.type == FieldDescriptor.TYPE_STRING:
            text = self._random.choice(self._texts)
            if text and self._random.random() < 0.3:
                at = self._random.randrange(len(text))
                text = text[:at] + self._random.choice("\n\t ().[]:x0é") + text[at + self._random.randrange(3) :]
            return text
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._random.choice(self._bytes)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._random.random() < 0.5
        if field.type in _NUMBERS:
            return self._random.choice(_INTEGERS)
        return self._random.choice(_FLOATS)

    def _nest(self, message: Message) -> None:
        """Put a value into itself many times, where the grammar allows it."""
        parts = [part for part in parts_of(message) if _ways_back(part)]
        if not parts:
            return
        part = self._random.choice(parts)
        outer, inner = self._random.choice(_ways_back(part))
        for _ in range(self._random.choice(_DEPTHS)):
            copy = type(part)()
            copy.CopyFrom(part)
            if copy.ByteSize() > 10_000:
                return
            part.Clear()
            between = getattr(part, outer.name)
            between = between.add() if outer.is_repeated else between
            target = getattr(between, inner.name)
            (target.add() if inner.is_repeated else target).CopyFrom(copy)


def _ways_back(message: Message) -> list[tuple[FieldDescriptor, FieldDescriptor]]:
    """Return the ways from a message to a message of its own kind, as a value in a value's list."""
    kind = message.DESCRIPTOR
    return [
        (outer, inner)
        for outer in kind.fields
        if outer.message_type is not None
        for inner in outer.message_type.fields
        if inner.message_type == kind
    ]


def parts_of(message: Message) -> Iterator[Message]:
    """Yield a message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for one in value if field.is_repeated else [value]:
                if isinstance(one, Message):
                    yield from parts_of(one)


def _tried(give: Callable[[Any], object], value: Any) -> None:
    """Give a field a value, unless the field's type has no such value."""
    try:
        give(value)
    except (ValueError, TypeError, OverflowError):
        return


def parsed(kind: type[Message], data: bytes) -> Message | None:
    """Return a message from its bytes, or None if it is none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None
