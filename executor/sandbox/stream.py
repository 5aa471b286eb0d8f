"""What a block of a streamed trace saves step by step, in a sandboxed process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor.block.state import BlockState
from executor.sandbox.trace import SandboxedTrace
from interpose.v1 import trace_pb2 as pb


class Stream:
    """The increments of a block of a sandboxed trace.

    Args:
        trace: the trace.
        state: the block's state.

    Attributes:
        failure: why nothing more is sent.
    """

    def __init__(self, trace: SandboxedTrace, state: BlockState) -> None:
        self.failure: pb.Failure | None = None
        self._trace = trace
        self._state = state

    def step(self, namespace: Mapping[str, Any], steps: int, last: bool) -> bool:
        """Send what is new after a step; return False if the request must end."""
        _, self.failure, goes_on = self._trace.increments(self._state, steps, last, False)
        return goes_on

    def end(self, namespace: Mapping[str, Any], steps: int) -> pb.Event:
        """Return what is new since the last step, after the request has ended."""
        events, failure, _ = self._trace.increments(self._state, steps, True, True)
        self.failure = self.failure or failure
        invoke = self._state.identity.invoke
        return events[0] if events else self._trace.numbered(pb.Increment(invoke=invoke, steps=steps, last=True))
