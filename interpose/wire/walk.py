"""The parts of a wire value, for code that searches a trace without decoding it."""

from __future__ import annotations

from collections.abc import Iterator

from interpose.v1.value_pb2 import Blob, Value


def parts(value: Value) -> Iterator[Value]:
    """Iterate over the direct parts of a wire value."""
    kind = value.WhichOneof("kind")
    if kind in ("list", "tuple", "set", "frozen_set", "size"):
        yield from getattr(value, kind).items
    elif kind in ("dict", "record"):
        mapping = value.dict if kind == "dict" else value.record.fields
        yield from mapping.keys
        yield from mapping.values
    elif kind == "slice":
        yield from (value.slice.start, value.slice.stop, value.slice.step)
    elif kind == "attribute":
        yield value.attribute.object
    elif kind == "call":
        yield from value.call.args
        yield from (binding.value for binding in value.call.keywords)
    elif kind == "instance":
        yield from (value.instance.type, value.instance.contents)
        yield from (binding.value for binding in value.instance.attributes)
    elif kind == "function":
        yield from (binding.value for binding in value.function.reads)
    elif kind == "namespace":
        yield from (binding.value for binding in value.namespace.attributes)
    elif kind == "class_source":
        source = value.class_source
        yield from (binding.value for part in (source.needs, source.reads, source.attributes) for binding in part)


def blob_of(value: Value) -> Blob | None:
    """Return the blob that holds the bytes of a tensor or of a stack, or None."""
    kind = value.WhichOneof("kind")
    if kind not in ("tensor", "stack"):
        return None
    holder = value.tensor if kind == "tensor" else value.stack
    return holder.blob if holder.WhichOneof("payload") == "blob" else None
