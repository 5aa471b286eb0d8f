"""Which arrays of a message are in stacks, and the slices that stand for a list's items."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from interpose.v1.value_pb2 import StackSlice, Value
from interpose.wire import arrays

_SCANS = 8  # tensors that are looked for in runs before the runs' tensors are noted one by one


class StackedArrays:
    """The arrays of one message that are in stacks, by identity.

    The arrays of a run are noted together. They are noted one by one when one of them is met outside of the run.
    """

    def __init__(self) -> None:
        # The stack's index, the array's index in it, and the array, which keeps its id from being used again.
        self._noted: dict[int, tuple[int, int, object]] = {}
        # By the first array of a run: the stack's index, that array's index in it, and the run's arrays.
        self._runs: dict[int, tuple[int, int, Sequence[Any]]] = {}
        self._scans = 0

    def __bool__(self) -> bool:
        return bool(self._noted or self._runs)

    def note(self, stack: int, members: Sequence[Any], since: int = 0) -> None:
        """Note the arrays of a stack, from the array with the index `since` on."""
        found = zip(itertools.repeat(stack), itertools.count(since), members, strict=False)
        self._noted.update(zip(map(id, members), found, strict=False))

    def note_runs(self, stack: int, runs: Sequence[Sequence[Any]]) -> None:
        """Note the arrays of a stack, in runs; each run is part of a list."""
        since = 0
        for members in runs:
            self._runs[id(members[0])] = stack, since, members
            since += len(members)

    def find(self, obj: object) -> tuple[int, int, object] | None:
        """Return where an array is; None if it is in no stack.

        Returns:
            The stack's index, the array's index in the stack, and the array.
        """
        found = self._noted.get(id(obj))
        if found is not None or not self._runs or not arrays.is_tensor(obj):
            return found
        self._scans += 1
        runs = self._runs.values()
        if self._scans <= _SCANS and not any(
            any(map(operator.is_, members, itertools.repeat(obj))) for *_, members in runs
        ):
            return None
        for stack, since, members in runs:
            self.note(stack, members, since)
        self._runs = {}
        return self._noted.get(id(obj))

    def values(
        self, items: Sequence[object], sent: Sequence[Any], encode: Callable[[int, object], Value]
    ) -> list[Value]:
        """Return the values of the items of a list.

        Arrays that follow each other in a stack are one value.

        Args:
            items: the items.
            sent: what is encoded in their positions.
            encode: returns the value of an item that is in no stack, given its index too.
        """
        values: list[Value] = []
        at = done = 0
        while self._runs and at < min(len(sent), done + _SCANS):
            stack, since, members = self._runs.get(id(sent[at]), (0, 0, ()))
            stop = at + len(members)
            if not members or stop > len(sent) or not all(map(operator.is_, sent[at:stop], members)):
                at += 1
                continue
            values += self._values(items, sent, range(done, at), encode)
            values.append(Value(stacked=StackSlice(stack=stack, first=since, count=len(members))))
            done = at = stop
        return values + self._values(items, sent, range(done, len(items)), encode)

    def _values(
        self, items: Sequence[object], sent: Sequence[Any], span: range, encode: Callable[[int, object], Value]
    ) -> list[Value]:
        """Return the values of the items of a span, without a look for runs."""
        values: list[Value] = []
        found = list(map(self._noted.get, map(id, sent[span.start : span.stop])))
        at, count = 0, len(found)
        while at < count:
            here = found[at]
            if here is None:
                values.append(encode(span[at], items[span[at]]))
                at += 1
                continue
            stack, since, _ = here
            stop = at + 1
            while stop < count and (next_ := found[stop]) and next_[0] == stack and next_[1] == since + stop - at:
                stop += 1
            values.append(Value(stacked=StackSlice(stack=stack, first=since, count=stop - at)))
            at = stop
        return values
