"""A block captured in a test, sent through the wire, and run by an interleaver without an engine: it reads no locations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from executor.block.budget import Budget
from executor.block.tally import Precision
from executor.core.request import Batch, InvokeRequest, Opened, Span
from executor.interleave.context import Host
from executor.interleave.interleaver import Interleaver
from executor.model.kv_guard import CacheGuard
from executor.model.tree import ModuleTree
from executor.parallel.agreement import Alone
from executor.parallel.pipeline import OneStage
from executor.saves.collect import Limits as SaveLimits
from executor.saves.outbox import LocalOutbox
from interpose import capture
from interpose.contract.errors import from_failure
from interpose.contract.result import Result
from interpose.modules.envoy import Envoy
from interpose.modules.tree import Node
from interpose.program.builder import TraceBuilder
from interpose.program.libraries import Libraries
from interpose.results.outcome import Outcome, update_in_place, values_of
from interpose.v1.service_pb2 import Limits
from interpose.v1.trace_pb2 import Event, Prompt, TokenIds, Trace

LIMITS = Limits(inline_bytes=64, max_program_bytes=20_000, max_message_bytes=1 << 24, max_upload_bytes=1 << 30)
TREE = Node("", "Model", children={"layer": Node("layer", "Layer")}, model="test")
MODEL = torch.nn.ModuleDict({"layer": torch.nn.Identity()})


class Fetches:
    """Stands where the client fetches blobs."""

    def __init__(self, outbox: LocalOutbox) -> None:
        self.outbox = outbox

    def fetch(self, session_id: str, blobs: Any) -> dict[str, Any]:
        return {blob.id: bytearray(self.outbox.blobs[blob.id]) for blob in blobs}


class Shipped(capture.CapturedContext):
    """``with Shipped() as tracer:`` runs the block as a worker does and assigns what it saved.

    Attributes:
        trace: what travelled.
        logs: what it printed.
    """

    def __init__(
        self,
        alter: Callable[[Trace], object] = lambda trace: None,
        step_seconds: float = 5.0,
        libraries: Libraries | None = None,
    ) -> None:
        self.libraries = libraries
        self.alter = alter
        self.budget = Budget(step_seconds, 512 << 20)
        self.logs = ""

    def run_block(self, block: capture.Block, scope: capture.Scope) -> None:
        builder = TraceBuilder("test", TREE, LIMITS, lambda obj: obj is self, libraries=self.libraries)
        builder.add_invoke(block, scope, Prompt(token_ids=TokenIds(ids=[1])), {})
        self.trace = Trace.FromString(builder.build().SerializeToString())
        self.alter(self.trace)
        outbox = LocalOutbox()
        outbox.uploads.update({digest: bytes(data) for digest, data in builder.blobs.items()})
        limits = SaveLimits(64, 1 << 24)
        tree: Any = ModuleTree(MODEL, 1)
        applies_nothing: Any = None
        precision = Precision(torch.float32, torch.float32, "", "highest")
        worker = Interleaver(
            Host(
                tree,
                applies_nothing,
                self.budget,
                outbox,
                limits,
                Alone(),
                OneStage(),
                True,
                precision,
                10,
                CacheGuard({}),
            )
        )
        worker.open(Opened(self.trace, "", None))
        worker.admit("r", InvokeRequest(self.trace.id, 0), 1, 0)
        worker.begin_step(Batch({"r": Span(0, 0, 1)}, 1, 1, 1))
        worker.end_forward()
        worker.end_step()
        _, events, _ = worker.finish(self.trace.id, 0, Result())
        assert worker.idle
        self.logs = "".join(text for _, _, text in outbox.logs)
        captured = builder.captured()
        for event in map(Event.FromString, events):
            if event.WhichOneof("kind") == "failed":
                raise from_failure(event.failed)
            outcome = Outcome(saves=[event.saves])
            for _, values, updates in values_of(outcome, Fetches(outbox), TREE):  # type: ignore[arg-type]
                for index, contents in updates.items():
                    update_in_place(captured.get(index), contents)
                scope.assign(values)


def envoy() -> Envoy:
    """Return the model of a test."""
    return Envoy(TREE, TREE)


def altered(alter: Any, step_seconds: float = 5.0) -> Shipped:
    """A tracer whose trace's classes are changed on the way."""

    def change(trace: Any) -> None:
        for value in trace.scope.values:
            alter(value)

    return Shipped(change, step_seconds)
