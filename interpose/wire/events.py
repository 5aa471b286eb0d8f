"""What a serialized event is, and bundles of serialized events, without parsing them.

An event has exactly one field, so its first bytes name its kind. Events that are there at the same time travel as one event,
a bundle, because each message between two processes costs more than an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from interpose.v1 import trace_pb2 as pb

# Bytes of the events in one bundle. A larger event travels by itself.
BUNDLE_BYTES = 1 << 20

_KINDS = {field.number: str(field.name) for field in pb.Event.DESCRIPTOR.fields}
_LENGTH_DELIMITED = 2
_BUNDLE_TAG = pb.Event.DESCRIPTOR.fields_by_name["bundle"].number << 3 | _LENGTH_DELIMITED
_EVENTS_TAG = pb.Bundle.DESCRIPTOR.fields_by_name["events"].number << 3 | _LENGTH_DELIMITED


def kind_of(data: bytes) -> str:
    """Return the kind of a serialized event as `WhichOneof("kind")` does, "" if it has none."""
    tag = 0
    for index, byte in enumerate(data[:5]):
        tag |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return _KINDS.get(tag >> 3, "")
    return ""


def bundles(events: Iterable[bytes]) -> Iterator[bytes]:
    """Yield serialized events, with events that follow each other in bundles.

    An event that has no other beside it is no bundle.
    """
    held: list[bytes] = []
    size = 0
    for event in events:
        if held and size + len(event) > BUNDLE_BYTES:
            yield _bundle(held)
            held, size = [], 0
        held.append(event)
        size += len(event)
    if held:
        yield _bundle(held)


def apart(data: bytes) -> list[bytes]:
    """Return the serialized events of a bundle, or the event itself if it is no bundle."""
    if kind_of(data) != "bundle":
        return [data]
    _, at = _number(data, 0)
    _, at = _number(data, at)
    events: list[bytes] = []
    while at < len(data):
        _, at = _number(data, at)
        size, at = _number(data, at)
        events.append(data[at : at + size])
        at += size
    return events


def _bundle(events: list[bytes]) -> bytes:
    if len(events) == 1:
        return events[0]
    tag = _varint(_EVENTS_TAG)
    content = b"".join(part for event in events for part in (tag, _varint(len(event)), event))
    return b"".join((_varint(_BUNDLE_TAG), _varint(len(content)), content))


def _varint(number: int) -> bytes:
    """Return a number as protobuf writes it."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that protobuf wrote at an offset, and the offset behind it."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
