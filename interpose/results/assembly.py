"""The saved values of a streamed invoke, put together from its increments.

A table of objects grows with the increments. A list, a dict or a set stays the same object for the whole stream: an increment
changes it in place, as the block did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from interpose.contract.errors import EngineError
from interpose.v1.trace_pb2 import Increment, Patch
from interpose.v1.value_pb2 import Blob, Objects
from interpose.wire import arrays
from interpose.wire.arrays import ArrayError
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import WireError
from interpose.wire.resolver import Resolver
from interpose.wire.walk import blob_of


class Assembly:
    """The values that one invoke has saved so far.

    Args:
        captured: the caller's own objects, by index in the trace's scope. An object that the block changes is changed here.
        resolver: rebuilds modules of the served model.

    Attributes:
        names: values by name.
        buffers: the bytes of large values, by blob id. The caller of `add` puts them here before the call.
    """

    def __init__(self, captured: Mapping[int, object], resolver: Resolver) -> None:
        self.names: dict[str, object] = {}
        self.buffers: dict[str, Any] = {}
        self._captured = captured
        self._objects = Objects()
        self._decoder = Decoder(self._objects, get_blob=self._buffer, resolver=resolver)
        self._next = 0

    def add(self, increment: Increment) -> None:
        """Apply the next increment.

        Raises:
            EngineError: the increment does not follow the increments before it, or a value cannot be rebuilt.
        """
        if increment.sequence != self._next or increment.first != len(self._objects.values):
            raise EngineError(
                f"the server sent increment {increment.sequence} of invoke {increment.invoke} where {self._next} was next"
            )
        self._next += 1
        self._objects.values.extend(increment.objects.values)
        try:
            self._apply(increment)
        except (WireError, ArrayError, TypeError) as error:  # TypeError: a key has no hash
            raise EngineError(f"the server sent a value that cannot be rebuilt: {error}") from error
        for index in range(increment.first, len(self._objects.values)):
            self._objects.values[index].Clear()  # the value is rebuilt, so its bytes can go

    def _buffer(self, blob: Blob) -> Any:
        # Each buffer becomes the memory of a single array.
        buffer = self.buffers.pop(blob.id, None)
        if buffer is None:
            raise WireError(f"the large value {blob.id} is named twice")
        return buffer

    def _apply(self, increment: Increment) -> None:
        self._decoder.adopt({own.entry: self._captured.get(own.index) for own in increment.captured})
        for index in range(increment.first, len(self._objects.values)):
            self._decoder.complete(index)
        for patch in increment.patches:
            self._patch(self._target(patch), patch)
        for binding in increment.names:
            self.names[binding.name] = self._decoder.decode(binding.value)
        for name in increment.dropped:
            self.names.pop(name, None)

    def _target(self, patch: Patch) -> Any:
        """Return the object of the table, or the array of a stack, that a patch changes."""
        if not patch.HasField("at"):
            return self._decoder.object(patch.index)
        stack = self._decoder.stack(patch.index)
        if patch.at >= len(stack):
            raise WireError(f"array {patch.at} of a stack of {len(stack)}")
        return stack[patch.at]

    def _patch(self, target: Any, patch: Patch) -> None:
        decode = self._decoder.decode
        kind = patch.WhichOneof("change")
        if kind == "list" and isinstance(target, list):
            target[patch.list.keep :] = self._decoder.items(patch.list.items)
        elif kind == "set" and isinstance(target, set):
            target.difference_update([decode(item) for item in patch.set.removed])
            target.update([decode(item) for item in patch.set.added])
        elif kind == "dict" and isinstance(target, dict):
            for key in patch.dict.removed:
                target.pop(decode(key), None)
            changed = patch.dict.changed
            for key, value in zip(changed.keys, changed.values, strict=True):
                target[decode(key)] = decode(value)
        elif kind == "tensor" and hasattr(target, "shape"):
            arrays.overwrite(target, self._decoder.array(patch.tensor))
        else:
            raise WireError(f"a {type(target).__name__} cannot be changed by a patch of a {kind}")


def blobs_of(increment: Increment) -> Iterator[Blob]:
    """Return the large values of an increment, which are fetched before `Assembly.add`."""
    yield from (blob for value in increment.objects.values if (blob := blob_of(value)) is not None)
    for patch in increment.patches:
        if patch.HasField("tensor") and patch.tensor.HasField("blob"):
            yield patch.tensor.blob
