"""Saved values as a session holds them, and the blob ids in a trace's messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Value
from interpose.wire.walk import blob_of, parts


@dataclass(frozen=True)
class Saved:
    """The bytes of one saved tensor.

    Attributes:
        ref: reference to the bytes, uint8 of shape [size].
        size: number of bytes.
    """

    ref: Any
    size: int


def named(message: pb.Saves | pb.Increment) -> tuple[set[str], set[str], bool]:
    """Return the blob ids of the tensors that a trace saved: new tensors, and earlier traces'.

    Values of other sessions become the session's own, because the session now holds them too.

    Returns:
        The ids of new tensors, the ids of earlier traces' tensors, and whether the message has changed.
    """
    values: list[Value] = [*message.objects.values]
    values.extend(binding.value for binding in message.names)
    if isinstance(message, pb.Saves):
        values.extend(update.value for update in message.updates)
    else:
        values.extend(Value(tensor=patch.tensor) for patch in message.patches if patch.HasField("tensor"))
    own: set[str] = set()
    earlier: set[str] = set()
    changed = False
    for value in nested(values):
        blob = blob_of(value)
        if blob is not None:
            own.add(blob.id)
        elif value.WhichOneof("kind") == "remote":
            changed = changed or bool(value.remote.session_id)
            value.remote.session_id = ""
            earlier.add(value.remote.blob_id)
    return own, earlier, changed


def nested(values: Iterable[Value]) -> Iterator[Value]:
    """Iterate over saved values and their parts."""
    todo = list(values)
    while todo:
        value = todo.pop()
        yield value
        todo.extend(parts(value))
