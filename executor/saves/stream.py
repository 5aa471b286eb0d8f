"""What one invoke of a streamed trace saves: each step's increment carries only new things.

The invoke has one table of objects for its whole life. An increment brings the entries that were added to the table. For
containers and tensors that were sent before, it brings their changes: the items that a list got at its end, the keys that a
dict got or lost, a tensor of the block's own that was changed in place. A snapshot never changes and is sent once. So a block
that saves one row in each step sends one row in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy
import torch

from executor.core.errors import BudgetExceeded, Refusal
from executor.core.text import clip
from executor.saves.changes import SentArray, SentTensors, changed_among, fresh_items, patch, shallow
from executor.saves.collect import Limits
from executor.saves.encoder import SaveEncoder, Stacks, counts_changes
from executor.saves.outbox import Outbox
from executor.saves.registry import Search
from executor.saves.trace import Bounds, SavingTrace
from interpose.v1 import trace_pb2 as pb

# How many values are searched for saved values in one step. Larger containers are searched after the request has ended.
_SEARCHED = 20_000
_UNBOUND = object()


class Increments(Protocol):
    """Sends what one invoke of a streamed trace saves, step by step.

    Attributes:
        failure: why nothing more is sent; the invoke fails with it.
    """

    failure: pb.Failure | None

    def step(self, namespace: Mapping[str, Any], steps: int, last: bool) -> bool:
        """Send what is new after a step; return False if sending failed and the request must end."""

    def end(self, namespace: Mapping[str, Any], steps: int) -> pb.Event:
        """Return what is new since the last step, after the request has ended."""


class SaveStream:
    """The increments of one invoke, made on the rank that reports.

    Size: a step compares everything that was sent, so all of it is in one place.

    Args:
        scope: the trace.
        program: the invoke's block.
        invoke: the invoke's index.
        limits: bounds on what is saved.
        budget: bounds the time to make one increment.
        outbox: takes increments and blobs.

    Attributes:
        failure: why nothing more is sent; the invoke fails with it.
    """

    def __init__(
        self, scope: SavingTrace, program: pb.Program, invoke: int, limits: Limits, budget: Bounds, outbox: Outbox
    ) -> None:
        self.failure: pb.Failure | None = None
        self._scope = scope
        self._invoke = invoke
        self._limits = limits
        self._budget = budget
        self._held: list[tuple[str, memoryview]] = []  # blobs of the increment that is being made
        self._outbox = outbox
        # A value that another invoke may also change is sent when the whole trace has ended.
        self._captured = scope.captured() if scope.expected == 1 else {}
        reads = [binding.name for binding in program.reads] if self._captured else []
        self._names = tuple(dict.fromkeys((*program.writes, *reads)))
        self._written = frozenset(program.writes)
        self._bound: dict[str, Any] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}  # by index: the container, and its items when it was sent
        self._arrays: dict[int, SentArray] = {}
        self._own = SentTensors()
        self._sequence = 0
        self._blobs = 0
        self._open = True
        self._encoder = SaveEncoder(
            scope.registry,
            limits.inline_bytes,
            self._put,
            limits.max_saved_bytes - scope.saved_bytes,
            stacks=Stacks.ANY if scope.stacks else Stacks.NONE,
        )

    def step(self, namespace: Mapping[str, Any], steps: int, last: bool) -> bool:
        """Send what is new after a step; return False if sending failed and the request must end.

        Args:
            namespace: the block's names.
            steps: the number of steps that have ended.
            last: whether the block does nothing more before the request has ended.
        """
        if self._open:
            increment = self._bounded(namespace, steps, final=False)
            increment.last = last or self.failure is not None
            self._open = not increment.last
            event = pb.Event(increment=increment).SerializeToString()
            self._outbox.increment(self._scope.session, self._scope.id, event)
        return self.failure is None

    def end(self, namespace: Mapping[str, Any], steps: int) -> pb.Event:
        """Return what is new since the last step, after the request has ended."""
        self._open = False
        increment = self._bounded(namespace, steps, final=True)
        increment.last = True
        return pb.Event(increment=increment)

    def _bounded(self, namespace: Mapping[str, Any], steps: int, final: bool) -> pb.Increment:
        """Return what is new, encoded within a budget.

        The budget is needed because objects of the block have code of their own.
        """
        sequence = self._sequence
        try:
            increment, _ = self._budget.run(lambda: self._increment(namespace, steps, final), 0.0, self._scope.blame)
        except BudgetExceeded:
            self._held.clear()
            increment = pb.Increment(invoke=self._invoke, sequence=sequence, steps=steps)
            self._sequence = sequence + 1
            self._fail(increment, pb.ERROR_CODE_DEADLINE_EXCEEDED, self._too_long())
        for blob_id, data in self._held:
            self._outbox.put(self._scope.session, self._scope.id, blob_id, data)
        self._held.clear()
        return increment

    def _too_long(self) -> str:
        return (
            f"sending what the block saved in one step took longer than {self._budget.step_seconds:g} s; save tensors instead of "
            "long lists of numbers"
        )

    def _increment(self, namespace: Mapping[str, Any], steps: int, final: bool) -> pb.Increment:
        increment = pb.Increment(invoke=self._invoke, sequence=self._sequence, steps=steps)
        self._sequence += 1
        if self.failure is None:
            counted = self._encoder.bytes
            try:
                self._change(increment, namespace, final)
            except Exception as error:  # No caller in the engine's step could handle it.
                code = error.code if isinstance(error, Refusal) else pb.ERROR_CODE_INVALID_ARGUMENT
                self._fail(increment, code, f"what the block saved cannot be sent: {error}")
            self._scope.saved_bytes += max(self._encoder.bytes - counted, increment.ByteSize())
            if self._scope.saved_bytes > self._limits.max_saved_bytes:
                limit = self._limits.max_saved_bytes >> 20
                self._fail(
                    increment,
                    pb.ERROR_CODE_QUOTA_EXCEEDED,
                    f"the trace saved more than the {limit} MiB it may; save fewer rows or a smaller dtype",
                )
        return increment

    def _fail(self, increment: pb.Increment, code: Any, message: str) -> None:
        for field in ("objects", "patches", "names", "dropped", "captured"):
            increment.ClearField(field)
        self.failure = pb.Failure(code=code, message=clip(message), trace_id=self._scope.id, invoke=self._invoke)

    def _change(self, increment: pb.Increment, namespace: Mapping[str, Any], final: bool) -> None:
        table = self._encoder.objects.values
        first = increment.first = len(table)
        changed = changed_among(self._containers)
        names = self._rebound(increment, namespace, None if final else Search(_SEARCHED))
        fresh = [item for pair in changed.values() for item in fresh_items(*pair)]
        self._encoder.stack([fresh, *names.values()], follow=self._own.add_stack)
        for index, (container, before) in changed.items():
            patch(self._encoder, increment, index, container, before)
            self._containers[index] = (container, shallow(container))
        for index, array in self._arrays.items():
            value = array.changed(self._encoder)
            if value is not None:
                increment.patches.add(index=index, tensor=value)
        increment.patches.extend(self._own.changes(self._encoder, final))
        for name, value in names.items():
            increment.names.add(name=name, value=self._encoder.encode(value))
        self._follow(increment, first)
        increment.objects.values.extend(table[first:])
        for value in table[first:]:
            value.Clear()  # The entry has been sent; only its index is needed.

    def _rebound(self, increment: pb.Increment, namespace: Mapping[str, Any], search: Search | None) -> dict[str, Any]:
        """Return the names that are bound to another saved value now.

        Names that hold no saved value any more are noted.
        """
        rebound: dict[str, Any] = {}
        for name in self._names:
            value = namespace.get(name, _UNBOUND)
            if self._bound.get(name, _UNBOUND) is value:
                continue
            mine = name in self._written or id(value) in self._captured
            if mine and self._scope.registry.reaches(value, search):
                self._bound[name] = value
                rebound[name] = value
            elif self._bound.pop(name, _UNBOUND) is not _UNBOUND:
                increment.dropped.append(name)
        return rebound

    def _follow(self, increment: pb.Increment, first: int) -> None:
        """Note the state in which the new entries of the table are sent."""
        for index, value in self._encoder.entries_from(first):
            if isinstance(value, list | dict | set):
                self._containers[index] = (value, shallow(value))
                if id(value) in self._captured:
                    increment.captured.add(index=self._captured[id(value)], entry=index)
                    self._scope.streamed.add(self._captured[id(value)])
            elif isinstance(value, torch.Tensor | numpy.ndarray) and not self._scope.registry.copied(value):
                if counts_changes(value):
                    self._own.add(index, value)
                else:
                    self._arrays[index] = SentArray(value)

    def _put(self, data: memoryview, fresh: bool) -> str:
        blob_id = f"{self._scope.id}/{self._invoke}/{self._blobs}"
        self._blobs += 1
        # The block goes on and may change a value of its own; the copy keeps the present bytes.
        self._held.append((blob_id, data if fresh else memoryview(bytes(data))))
        return blob_id
