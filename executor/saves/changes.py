"""How to tell that a saved value was changed since it was sent, and the patches for it."""

from __future__ import annotations

import contextlib
import itertools
import operator
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from executor.saves.encoder import SaveEncoder, StackOfOwn
from interpose.v1 import trace_pb2 as pb
from interpose.wire import arrays, stacks
from interpose.wire.arrays import ArrayError
from interpose.wire.encoder import WireError

_OTHER_LAYOUT = "a saved tensor was given another shape or type; save the new tensor under a name of its own"
_SUMMED_BYTES = 1 << 20  # bytes that are copied together; memory of this size is used again without a fault


class SentArray:
    """A sent array or inference tensor of the block's own, which does not count its changes."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._layout = (tuple(value.shape), str(value.dtype))
        self._checksum = zlib.crc32(_bytes(value))

    def changed(self, encoder: SaveEncoder) -> Any:
        """Return the tensor's message if its elements differ from the sent elements, else None."""
        if (tuple(self._value.shape), str(self._value.dtype)) != self._layout:
            raise WireError(_OTHER_LAYOUT)
        checksum = zlib.crc32(_bytes(self._value))
        if checksum == self._checksum:
            return None
        self._checksum = checksum
        return encoder.array(self._value)


class SentTensors:
    """The sent tensors of a block, and whether any of these tensors was changed since."""

    def __init__(self) -> None:
        # Of all tensors, in the order in which they were sent:
        self._members: list[Any] = []
        self._indices: list[tuple[int, int | None]] = []  # in the table, and in the stack there
        self._counters: list[int] = []
        self._layouts: list[tuple[Any, Any]] = []
        self._checksums: list[int] = []

    def add(self, index: int, tensor: Any) -> None:
        """Note a tensor as it was sent, as an entry of the table."""
        self._note([tensor], [(index, None)], [zlib.crc32(_bytes(tensor))])

    def add_stack(self, stack: StackOfOwn) -> None:
        """Note a stack as it was sent."""
        indices: list[tuple[int, int | None]] = [(stack.index, at) for at in range(len(stack.members))]
        self._note(stack.members, indices, _summed(stack.members, stack.data))

    def _note(self, members: list[Any], indices: list[tuple[int, int | None]], checksums: list[int]) -> None:
        self._members += members
        self._indices += indices
        self._counters += map(_counter, members)
        self._layouts += map(_layout, members)
        self._checksums += checksums

    def changes(self, encoder: SaveEncoder, thorough: bool) -> list[pb.Patch]:
        """Return the changes of the tensors since they were sent.

        Args:
            thorough: whether to compare the bytes too. A change through memory shared with an array leaves no other mark.
        """
        counters = list(map(_counter, self._members))
        if not thorough and counters == self._counters:
            return []
        if list(map(_layout, self._members)) != self._layouts:
            raise WireError(_OTHER_LAYOUT)
        now, before = (self._summed(), self._checksums) if thorough else (counters, self._counters)
        changed = [number for number, pair in enumerate(zip(now, before, strict=True)) if pair[0] != pair[1]]
        self._counters = counters
        patches = []
        for number in changed:
            member = self._members[number]
            checksum = zlib.crc32(_bytes(member))
            if checksum != self._checksums[number]:
                self._checksums[number] = checksum
                index, at = self._indices[number]
                patches.append(pb.Patch(index=index, at=at, tensor=encoder.array(member)))
        return patches

    def _summed(self) -> list[int]:
        """Return the checksum of each tensor now; tensors of one layout are copied together."""
        found: dict[int, int] = {}
        for group in stacks.groups(self._members, _SUMMED_BYTES):
            with contextlib.suppress(ArrayError, RuntimeError, TypeError):  # They are copied one by one.
                found.update(zip(map(id, group), _summed(group, stacks.packed(group)), strict=True))
        return [found[id(one)] if id(one) in found else zlib.crc32(_bytes(one)) for one in self._members]


_counter = operator.attrgetter("_version")
_layout = operator.attrgetter("shape", "dtype")


def _summed(members: list[Any], data: memoryview) -> list[int]:
    """Return the checksum of each tensor of a stack, by the stack's bytes."""
    ends = itertools.accumulate((member.nbytes for member in members), initial=0)
    return [zlib.crc32(data[start:stop]) for start, stop in itertools.pairwise(ends)]


def _bytes(value: Any) -> memoryview:
    return arrays.tensor_bytes(value) if isinstance(value, torch.Tensor) else arrays.ndarray_bytes(value)


def shallow(container: Any) -> Any:
    return type(container)(container)


def _same(left: Iterable[Any], right: Iterable[Any]) -> bool:
    return all(map(operator.is_, left, right))


def differs(now: Any, before: Any) -> bool:
    """Return whether anything changed in a container since it was sent."""
    if type(now) is list:
        return len(now) != len(before) or not all(map(operator.is_, now, before))
    if isinstance(now, set):
        return bool(now != before)
    if len(now) != len(before) or not _same(now, before):
        return True
    return isinstance(now, dict) and not _same(now.values(), before.values())


def changed_among(containers: Mapping[int, tuple[Any, Any]]) -> dict[int, tuple[Any, Any]]:
    """Return the containers that changed since they were sent.

    Lists of the same length are compared all at once, because most lists of a stream stay as they are.

    Args:
        containers: by index, each container and its items when it was sent.
    """
    changed, same_length = {}, {}
    for index, pair in containers.items():
        if type(pair[0]) is list and len(pair[0]) == len(pair[1]):
            same_length[index] = pair
        elif differs(*pair):
            changed[index] = pair
    now, before = zip(*same_length.values(), strict=True) if same_length else ((), ())
    if not _same(itertools.chain.from_iterable(now), itertools.chain.from_iterable(before)):
        changed.update((index, pair) for index, pair in same_length.items() if differs(*pair))
        return {index: containers[index] for index in sorted(changed)}
    return changed


def _kept(now: list[Any], before: list[Any]) -> int:
    """Return how many leading items of a list stay."""
    if len(now) >= len(before) and _same(now, before):
        return len(before)
    shared = min(len(now), len(before))
    return next((i for i, (a, b) in enumerate(zip(now, before, strict=False)) if a is not b), shared)


def fresh_items(now: Any, before: Any) -> list[Any]:
    """Return the items or values that a container got since it was sent."""
    if isinstance(now, list):
        return now[_kept(now, before) :]
    if isinstance(now, set):
        return []
    return [value for key, value in now.items() if key not in before or before[key] is not value]


def patch(encoder: SaveEncoder, increment: pb.Increment, index: int, now: Any, before: Any) -> None:
    """Add what changed in a container since it was sent."""
    if isinstance(now, list):
        keep = _kept(now, before)
        increment.patches.add(index=index, list=pb.ListPatch(keep=keep, items=encoder.items(now[keep:])))
        return
    if isinstance(now, set):
        removed = [encoder.encode(item) for item in before - now]
        increment.patches.add(
            index=index, set=pb.SetPatch(removed=removed, added=[encoder.encode(item) for item in now - before])
        )
        return
    staying = [key for key in before if key in now]
    if not _same(now, staying):  # The order has changed, so the whole container is sent again.
        staying = []
    removed = before if not staying else [key for key in before if key not in now]
    change = pb.DictPatch(removed=[encoder.key(key) for key in removed])
    kept = set(staying)
    for key, value in now.items():
        if key not in kept or before[key] is not value:
            change.changed.keys.append(encoder.key(key))
            change.changed.values.append(encoder.encode(value))
    increment.patches.add(index=index, dict=change)
