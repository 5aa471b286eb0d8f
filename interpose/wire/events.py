"""What a serialized event is, without parsing it.

An event has exactly one field, so its first bytes name its kind.
"""

from __future__ import annotations

from interpose.v1 import trace_pb2 as pb

_KINDS = {field.number: str(field.name) for field in pb.Event.DESCRIPTOR.fields}


def kind_of(data: bytes) -> str:
    """Return the kind of a serialized event as `WhichOneof("kind")` does, "" if it has none."""
    tag = 0
    for index, byte in enumerate(data[:5]):
        tag |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return _KINDS.get(tag >> 3, "")
    return ""
