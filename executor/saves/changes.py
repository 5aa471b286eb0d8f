"""How to tell that a saved value was changed since it was sent, and the patches for it."""

from __future__ import annotations

import itertools
import operator
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from executor.saves.encoder import SaveEncoder, StackOfOwn
from interpose.v1 import trace_pb2 as pb
from interpose.wire import arrays, stacks
from interpose.wire.encoder import WireError

_OTHER_LAYOUT = "a saved tensor was given another shape or type; save the new tensor under a name of its own"


class SentArray:
    """A sent tensor or array of the block's own, and how to tell that it was changed since."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._take()

    def changed(self, encoder: SaveEncoder, thorough: bool) -> Any:
        """Return the tensor's message if its elements differ from the sent elements, else None.

        Args:
            thorough: whether to compare the bytes too. A change through memory shared with an array leaves no other mark.
        """
        if self._counter is not None and not thorough and self._counter == self._value._version:
            return None
        if (tuple(self._value.shape), str(self._value.dtype)) != self._layout:
            raise WireError(_OTHER_LAYOUT)
        if self._checksum == zlib.crc32(_bytes(self._value)):
            self._take()
            return None
        self._take()
        return encoder.array(self._value)

    def _take(self) -> None:
        value = self._value
        tracked = isinstance(value, torch.Tensor) and not value.is_inference()
        self._counter = value._version if tracked else None
        self._checksum = zlib.crc32(_bytes(value))
        self._layout = (tuple(value.shape), str(value.dtype))


class SentStacks:
    """The sent stacks of a block's tensors, and whether any of these tensors was changed since."""

    def __init__(self) -> None:
        self._stacks: list[tuple[int, list[Any]]] = []  # each stack's index in the table, and its tensors
        # Of all tensors together, in the order of the stacks:
        self._members: list[Any] = []
        self._indices: list[tuple[int, int]] = []
        self._counters: list[int] = []
        self._layouts: list[tuple[Any, Any]] = []
        self._checksums: list[int] = []

    def add(self, stack: StackOfOwn) -> None:
        """Note a stack as it was sent."""
        members = stack.members
        self._stacks.append((stack.index, members))
        self._members += members
        self._indices += [(stack.index, at) for at in range(len(members))]
        self._counters += map(_counter, members)
        self._layouts += map(_layout, members)
        self._checksums += _summed(members, stack.data)

    def changes(self, encoder: SaveEncoder, thorough: bool) -> list[pb.Patch]:
        """Return the changes of the tensors; arguments as of `SentArray.changed`."""
        counters = list(map(_counter, self._members))
        if not thorough and counters == self._counters:
            return []
        if list(map(_layout, self._members)) != self._layouts:
            raise WireError(_OTHER_LAYOUT)
        if thorough:
            packed = ((members, stacks.packed(members)) for _, members in self._stacks)
            now: list[int] = [checksum for pair in packed for checksum in _summed(*pair)]
            before = self._checksums
        else:
            now, before = counters, self._counters
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
