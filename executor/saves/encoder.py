"""What leaves a trace: the registry of saved values, snapshots, and their encoding."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from executor.core.errors import Refusal
from executor.core.torch_modes import unseen
from executor.model.items import ListOutputs, Outputs, plainly
from executor.model.meta_tensors import is_fake
from executor.model.module_name import ModuleName
from executor.model.values import Served
from executor.saves.leaves import leaves
from executor.saves.reuse import EarlierTensors
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import ARRAY_LIBRARY_TORCH, Blob, Objects, Tensor, Value
from interpose.wire import stacks as stacking
from interpose.wire.arrays import ArrayError, dtype_of, is_dense
from interpose.wire.encoder import Encoder

_MAX_DEPTH = 100
_MAX_ITEMS = 1_000_000
INLINE_STACK_BYTES = (
    1 << 20
)  # bytes of small tensors that travel inside the message: a blob costs a transfer of its own
_SCALARS = frozenset((int, str, float, bool))
CONTAINERS = (list, tuple, dict, set, frozenset)


class Search:
    """How many values a search may still look at."""

    def __init__(self, values: int) -> None:
        self._left = values

    def take(self, count: int) -> bool:
        """Return whether the search may look at `count` more values, and count them."""
        if count > self._left:
            return False
        self._left -= count
        return True


class SaveRegistry:
    """The saved values of one trace, by identity.

    A value that shares memory with what a block was served is copied when it is saved, because the model may still change it.
    `save` then returns an alias. A write to the alias still reaches the model; the copy stays as it was.

    Each alias keeps the copy of its own moment. The value itself keeps the latest copy: a name is still bound to the value
    after `h.save()` on a line of its own.

    Any other value belongs to the block. It comes back as it is when the trace ends, as a list that the block appends to.
    """

    def __init__(self) -> None:
        # The saved object itself is kept, so that its id is not used again.
        self._saved: dict[int, tuple[Any, Any]] = {}
        self._copies: set[int] = set()
        self._held: list[Served] = []

    def __len__(self) -> int:
        return len(self._saved)

    def clear(self) -> None:
        """Forget everything, because the trace has ended."""
        self._saved.clear()
        self._copies.clear()
        self._held.clear()

    def hold(self, served: Served) -> None:
        """Note that a block may hand out values of its location, until `release`."""
        if served not in self._held:
            self._held.append(served)

    def release(self, served: Served) -> None:
        """Note that the block has left that location. A second call does nothing."""
        if served in self._held:
            self._held.remove(served)

    def save(self, value: Any, served: Served | None) -> Any:
        """Register a value; return the value with which the block goes on.

        Args:
            value: any object.
            served: the served value of the block's location, if the block is at a location.
        """
        if isinstance(value, torch.Tensor):
            at_hand = self._held if served is None else [served, *self._held]
            with unseen():
                owned = any(one.owns(value) for one in at_hand)
            if not owned:
                self.mark(value, value)
                return value
            alias, snapshot = value.view_as(value), value.detach().clone()
            self.mark(alias, snapshot)
            self.mark(value, snapshot)
            return alias
        if isinstance(value, Outputs | ListOutputs):
            saved = [self.save(item, served) for item in value]
            snapshots = [self.snapshot(item) for item in saved]
            listed = isinstance(value, ListOutputs)
            items, snapshot = (saved, snapshots) if listed else (tuple(saved), tuple(snapshots))
            self.mark(items, snapshot)
            self.mark(value, snapshot)
            return items
        self.mark(value, value)
        return value

    def mark(self, value: Any, snapshot: Any) -> None:
        """Register `value`, which is sent as `snapshot`."""
        self._saved[id(value)] = (value, snapshot)
        if snapshot is not value:
            self._copies.add(id(snapshot))

    def copied(self, value: Any) -> bool:
        """Return whether a value is a snapshot, which nothing changes any more."""
        return id(value) in self._copies

    def snapshot(self, value: Any) -> Any:
        """Return what a value is sent as: its snapshot, or the value itself."""
        entry = self._saved.get(id(value))
        return entry[1] if entry is not None and entry[0] is value else value

    def __contains__(self, value: object) -> bool:
        entry = self._saved.get(id(value))
        return entry is not None and entry[0] is value

    def reaches(self, value: Any, search: Search | None = None) -> bool:
        """Return whether a value is saved, or is a container with a saved value at any depth.

        Args:
            search: bounds how many values are looked at. None means no bound.
        """
        seen: set[int] = set()
        todo: list[tuple[Any, int]] = [(value, 0)]
        while todo:
            item, depth = todo.pop()
            if item in self:
                return True
            if not isinstance(item, CONTAINERS) or id(item) in seen or depth > _MAX_DEPTH or len(seen) > _MAX_ITEMS:
                continue
            seen.add(id(item))
            if search is not None and not search.take(len(item)):
                return False
            inner: Iterable[Any] = item.values() if isinstance(item, dict) else item
            todo.extend((one, depth + 1) for one in inner)
        return False


def refuse_names(value: Any) -> None:
    """Refuse a value to be saved that is or holds a name of the model in place of a value.

    Keys of dicts may be names. Modules may be too, if they were in a container that came from the notebook.

    Raises:
        Refusal: INVALID_ARGUMENT, with the place and what to write instead.
    """
    seen: set[int] = set()
    todo: list[Any] = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, ModuleName):
            if item is value or not item.may_be_kept:
                raise item.misuse("saved", ".save()" if item is value else "")
        elif isinstance(item, CONTAINERS) and id(item) not in seen and len(seen) <= _MAX_ITEMS:
            seen.add(id(item))
            todo.extend(item.values() if isinstance(item, dict) else item)


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
    """

    def __init__(
        self,
        registry: SaveRegistry,
        inline_bytes: int,
        put_blob: Callable[[memoryview, bool], str],
        limit: int,
        earlier: EarlierTensors | None = None,
        stacks: Stacks = Stacks.NONE,
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
            sent=registry.snapshot,
        )

    @property
    def objects(self) -> Objects:
        """The table that the encoded values refer to."""
        return self._encoder.objects

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
        knows, copied = self._encoder.knows, self._registry.copied
        new = [leaf for leaf in leaves(values, self._registry.snapshot) if not knows(leaf)]
        if self._earlier is not None:
            new = [leaf for leaf in new if not self._earlier.made(leaf)]
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
        small: list[Any] = []
        large: list[Any] = []
        for leaf in found:
            (small if _size(leaf) <= self._inline_bytes else large).append(leaf)
        made = [self._packed(group, small=True) for group in stacking.groups(small)]
        made += [self._packed(group, small=False) for group in stacking.groups(large)]
        return [stack for stack in made if stack is not None]

    def _packed(self, group: list[Any], small: bool) -> StackOfOwn | None:
        size = sum([member.nbytes for member in group])
        if self.bytes + size > self._limit:
            return None  # `encode` says which value is too large
        try:
            layout, data = stacking.layout(group), stacking.packed(group)
        except (ArrayError, RuntimeError, TypeError):
            return None  # `encode` says which tensor cannot travel
        self.bytes += size
        layout.small = small
        inline = size <= self._inline_bytes or (small and (size <= INLINE_STACK_BYTES or self._stacks is Stacks.INLINE))
        payload = data.tobytes() if inline else Blob(id=self._put(data, True), size=size)
        return StackOfOwn(self._encoder.stack(group, layout, payload), group, data)

    def items(self, items: Iterable[Any]) -> list[Value]:
        """Return the messages of a list's items; it raises the errors of `encode`."""
        items = list(items)
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


def _size(leaf: Any) -> int:
    """Return the bytes of a tensor or array of any shape; 0 if it is sparse, and so in no stack."""
    return leaf.nbytes if not isinstance(leaf, torch.Tensor) or is_dense(leaf) else 0


def counts_changes(value: Any) -> bool:
    """Return whether a value is a tensor with a version counter."""
    return isinstance(value, torch.Tensor) and not value.is_inference()


def _shape_of(tensor: torch.Tensor) -> Tensor:  # any shape
    dtype: Any = dtype_of(tensor.dtype)
    return Tensor(dtype=dtype, shape=tensor.shape, library=ARRAY_LIBRARY_TORCH, shape_only=True)
