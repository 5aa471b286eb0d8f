"""Saved values and snapshots become messages, and their large tensors blobs."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from executor.core.errors import Refusal
from executor.model.items import ListOutputs, Outputs, plainly
from executor.model.meta_tensors import is_fake
from executor.model.module_name import ModuleName
from executor.saves.leaves import leaves
from executor.saves.registry import SaveRegistry, refuse_names
from executor.saves.reuse import EarlierTensors
from executor.saves.rows import Rows
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import ARRAY_LIBRARY_TORCH, Blob, Items, Objects, StackSlice, Tensor, Value
from interpose.wire import stacks as stacking
from interpose.wire.arrays import ArrayError, dtype_of, is_dense, tensor_bytes
from interpose.wire.encoder import Encoder

INLINE_STACK_BYTES = (
    1 << 20
)  # bytes of small tensors that travel inside the message: a blob costs a transfer of its own
_SCALARS = frozenset((int, str, float, bool))


class Stacks(enum.Enum):
    """Which stacks a receiver takes.

    Members:
        NONE: no stacks.
        INLINE: stacks, and the bytes of small tensors inside the message, however many these tensors are.
        ANY: stacks with their bytes in the message or in blobs.
    """

    NONE = enum.auto()
    INLINE = enum.auto()
    ANY = enum.auto()


class SaveEncoder:
    """Encodes the saved values of one message.

    Args:
        registry: the trace's saved values.
        inline_bytes: the size in bytes up to which a tensor travels inside the message.
        put_blob: takes the bytes of a larger tensor or stack, and whether nothing else uses these bytes; returns the blob id.
        limit: how many bytes the trace may still save.
        earlier: the tensors on the server of which a value may be an unchanged copy.
        stacks: which stacks the receiver takes.
        objects: the table, empty; None makes one.
    """

    def __init__(
        self,
        registry: SaveRegistry,
        inline_bytes: int,
        put_blob: Callable[[memoryview, bool], str],
        limit: int,
        earlier: EarlierTensors | None = None,
        stacks: Stacks = Stacks.NONE,
        objects: Objects | None = None,
    ) -> None:
        self._registry = registry
        self._inline_bytes = inline_bytes
        self._put = put_blob
        self._limit = limit
        self._earlier = earlier
        self._stacks = stacks
        self.bytes = 0
        self._encoder = Encoder(
            inline_bytes=inline_bytes,
            put_blob=lambda data: put_blob(data, False),
            special=self._special,
            sent=registry.snapshots,
            objects=objects,
        )

    @property
    def objects(self) -> Objects:
        """The table that the encoded values refer to."""
        return self._encoder.objects

    def close(self) -> None:
        """Drop what was encoded; nothing more is encoded, and the table stays as it is.

        Without it the values would be kept until Python collects cycles.
        """
        self._encoder.close()

    def stack(self, values: Iterable[Any], follow: Callable[[StackOfOwn], object] | None = None) -> None:
        """Put the tensors of containers into the table as stacks, before the values are encoded.

        A tensor that cannot be in a stack is left to `encode`.

        Args:
            values: the values that will be encoded.
            follow: takes the stacks of tensors that the block may still change. Numpy arrays and inference tensors of the
                block's own are then in no stack, because they do not count their changes.
        """
        if self._stacks is Stacks.NONE:
            return
        knows, copied, earlier = self._encoder.knows, self._registry.copied, self._earlier
        # A run's tensors are not looked at one by one: no table or earlier trace may know them, and nothing follows them.
        runs = follow is None and not earlier and not len(self.objects.values)
        found = leaves(values, self._registry, run_bytes=stacking.MAX_STACK_BYTES if runs else 0)
        for run in found.runs:
            self._packed(run.parts, run.rows[0].nbytes <= self._inline_bytes, run.rows)
        new = [leaf for leaf in found.single.values() if not knows(leaf)]
        if earlier:
            new = [leaf for leaf in new if not earlier.made(leaf)]
        if follow is None:
            self._pack(new)
            return
        self._pack([leaf for leaf in new if copied(leaf)])
        for stack in self._pack([leaf for leaf in new if not copied(leaf) and counts_changes(leaf)]):
            follow(stack)

    def _pack(self, found: list[Any]) -> list[StackOfOwn]:
        """Make stacks of tensors.

        Tensors that would be blobs by themselves are in stacks of their own.
        """
        if len(found) < 2:  # the least that a stack has
            return []
        sizes = _sizes(found)
        small, large = found, []
        if sizes and max(sizes) > self._inline_bytes:
            small = [leaf for leaf, size in zip(found, sizes, strict=True) if size <= self._inline_bytes]
            large = [leaf for leaf, size in zip(found, sizes, strict=True) if size > self._inline_bytes]
        made = [self._packed(group, small=True) for group in stacking.groups(small)]
        made += [self._packed(group, small=False) for group in stacking.groups(large)]
        return [stack for stack in made if stack is not None]

    def _packed(self, group: list[Any], small: bool, rows: torch.Tensor | None = None) -> StackOfOwn | None:
        """Put a group into the table as one stack; return it, unless nothing follows its tensors.

        Nothing is put there if `encode` has to say what is wrong with a tensor.

        Args:
            group: the tensors or arrays; those of a run in parts.
            small: whether each of them would travel inside the message.
            rows: the tensor [arrays, ...] that has them as its rows; None: there is none.
        """
        size = sum(map(_NBYTES, group)) if rows is None else rows.nbytes
        if self.bytes + size > self._limit:
            return None
        try:
            if rows is None:
                layout, data = stacking.layout(group), stacking.packed(group)
            else:
                layout, data = stacking.layout_of(rows), tensor_bytes(rows)
        except (ArrayError, RuntimeError, TypeError):
            return None
        self.bytes += size
        layout.small = small
        payload = self._payload(data, small, rows is None or rows.device.type != "cpu")
        if rows is not None:
            self._encoder.stack_runs(group, layout, payload)
            return None
        index = self._encoder.stack(group, layout, payload)
        return StackOfOwn(index, group, data)

    def _payload(self, data: memoryview, small: bool, fresh: bool) -> bytes | Blob:
        """Return the bytes of a stack, in the message or as a blob.

        Args:
            data: the bytes.
            small: whether each of the tensors would travel inside the message.
            fresh: whether nothing else uses the bytes.
        """
        size = data.nbytes
        if size <= self._inline_bytes or (small and (size <= INLINE_STACK_BYTES or self._stacks is Stacks.INLINE)):
            return data.tobytes()
        return Blob(id=self._put(data, fresh), size=size)

    def _rows(self, rows: torch.Tensor) -> Value:  # [items, ...]
        """Return the value of many items of a list, whose stack comes into the table."""
        self._count(rows.nbytes)
        layout, data = stacking.layout_of(rows), tensor_bytes(rows)
        layout.small = rows[0].nbytes <= self._inline_bytes
        stack = self._encoder.stack((), layout, self._payload(data, layout.small, True))
        return Value(stacked=StackSlice(stack=stack, first=0, count=len(rows)))

    def items(self, items: Iterable[Any]) -> list[Value]:
        """Return the messages of a list's items; it raises the errors of `encode`."""
        items = list(items)
        if set(map(type, items)) != {torch.Tensor}:
            for item in items:
                refuse_names(item)
        return self._encoder.items(items)

    def encode(self, value: Any) -> Value:
        """Return the message of a value as it was saved.

        Raises:
            WireError: the value cannot travel.
            Refusal: QUOTA_EXCEEDED, the trace saved more than it may; INVALID_ARGUMENT, the value holds a name where a value is
                meant.
        """
        refuse_names(value)
        return self._encoder.encode(value)

    def listed(self, rows: Sequence[Rows]) -> Value:
        """Return the message of a new list with the items of some `Rows`.

        Raises:
            Refusal: QUOTA_EXCEEDED, the trace saved more than it may.
            ArrayError: the wire has no such dtype.
        """
        return self._encoder.refer([], lambda: Value(list=Items(items=[self._rows(one.tensor) for one in rows])))

    def key(self, value: Any) -> Value:
        """Return the message of a dict's key; it raises the errors of `encode`."""
        return self._encoder.encode(value)

    def entries_from(self, first: int) -> list[tuple[int, object]]:
        """Return the objects whose entries were added to the table at index `first` or later."""
        return self._encoder.entries_from(first)

    def array(self, value: Any) -> Tensor:
        """Return the present elements of a tensor or array of any shape.

        The table's entry of the tensor, if it has any, is not looked at.
        """
        self._count(value.nbytes)
        return self._encoder.array(value).tensor

    def contents(self, value: Any) -> Value:
        """Return the present contents of a container, not a reference to it.

        It raises the errors of `encode`.
        """
        refuse_names(value)
        reference = self._encoder.encode(value)
        return self.objects.values[reference.ref] if reference.WhichOneof("kind") == "ref" else reference

    def _special(self, value: Any) -> Value | None:
        if type(value) in _SCALARS:
            return None
        if type(value) is Rows:
            return self._rows(value.tensor)
        snapshot = self._registry.snapshot(value)
        if snapshot is not value:
            return self._encoder.encode(snapshot)
        if is_fake(value):
            return self._encoder.refer(value, lambda: Value(tensor=_shape_of(value)))
        origin = self._earlier.origin(value) if self._earlier is not None else None
        if origin is not None:
            return self._encoder.refer(value, lambda: Value(remote=origin))
        if isinstance(value, torch.Tensor) and is_dense(value):  # a tensor that is not dense is refused
            self._count(value.nbytes)
        if isinstance(value, Outputs | ListOutputs):
            return self._encoder.encode(plainly(value))
        if isinstance(value, ModuleName):
            return Value(module=value.path)
        return None

    def _count(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self._limit:
            raise Refusal(
                pb.ERROR_CODE_QUOTA_EXCEEDED,
                f"the trace saved more than the {self._limit >> 20} MiB it may; save fewer rows or a smaller dtype",
            )


@dataclass(frozen=True)
class StackOfOwn:
    """A stack of tensors that are the block's own.

    Attributes:
        index: the stack's index in the table.
        members: the tensors.
        data: their bytes as they were sent, one tensor after the other.
    """

    index: int
    members: list[Any]
    data: memoryview


_NBYTES = operator.attrgetter("nbytes")


def _sizes(found: list[Any]) -> list[int]:
    """Return the bytes of tensors and arrays, as of `_size`."""
    try:
        return list(map(_NBYTES, found))
    except (RuntimeError, NotImplementedError, TypeError):  # one of them is sparse
        return list(map(_size, found))


def _size(leaf: Any) -> int:
    """Return the bytes of a tensor or array of any shape; 0 if it is sparse, and so in no stack."""
    return leaf.nbytes if not isinstance(leaf, torch.Tensor) or is_dense(leaf) else 0


def counts_changes(value: Any) -> bool:
    """Return whether a value is a tensor with a version counter."""
    return isinstance(value, torch.Tensor) and not value.is_inference()


def _shape_of(tensor: torch.Tensor) -> Tensor:  # any shape
    dtype: Any = dtype_of(tensor.dtype)
    return Tensor(dtype=dtype, shape=tensor.shape, library=ARRAY_LIBRARY_TORCH, shape_only=True)
