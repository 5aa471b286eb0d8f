"""Standing edits in a sandboxed process."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from executor.block.barrier import Barrier
from executor.block.scope import Scope, Sent
from executor.block.shared_names import SharedNames
from executor.sandbox.trace import SandboxedTrace
from executor.saves.collect import Limits
from executor.saves.registry import SaveRegistry
from interpose.v1 import trace_pb2 as pb


class SandboxedEdit(Scope):
    """A standing edit in the process of the trace that names it.

    Args:
        key: the edit's key.
        trace: the trace.
    """

    def __init__(self, key: str, trace: SandboxedTrace) -> None:
        self.id = key
        self.expected = 1
        self.session = trace.session
        self.arrival = trace.arrival
        self.registry = SaveRegistry()
        self.recorded_bytes = 0
        self.shared = SharedNames(pb.Trace(), {})

    @property
    def barriers(self) -> dict[int, Barrier]:
        return {}

    def leave(self, names: MutableMapping[str, Any], lends: bool) -> None:
        names.clear()

    def let_go(self) -> None:
        """Do nothing: the process drops an edit with its block."""

    def saved(self, invoke: int, names: Mapping[str, Any], used: float, limits: Limits) -> Sent:
        return [], []

    def given_back(self, limits: Limits) -> Sent:
        return [], []
