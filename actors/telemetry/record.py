"""What is known of a trace that has ended: for the metrics, for the log, and for its span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.telemetry import metrics
from actors.telemetry.counts import Counts


@dataclass(frozen=True)
class TraceRecord:
    """A trace that has ended.

    Size: data: each field is a figure of the trace.

    Attributes:
        tenant, model, session, trace: the names of the tenant and the model, and the ids of the session and the trace.
        method: "trace", "job", "scan" or "explain".
        outcome: "done", "failed" or "cancelled".
        code: the code of the first failure, "" if there is none.
        invokes, prompt_tokens, generated_tokens, saved_bytes: how much it was.
        queued, running: the seconds before and after its first block began, or its first event came.
        tiers: the steps of its blocks in each tier.
        block_seconds: the seconds for which forward passes waited for its blocks.
    """

    tenant: str
    model: str
    session: str
    trace: str
    method: str
    outcome: str
    code: str = ""
    invokes: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    saved_bytes: int = 0
    queued: float = 0.0
    running: float = 0.0
    tiers: Mapping[str, int] = field(default_factory=dict)
    block_seconds: float = 0.0

    def count(self, counts: Counts) -> None:
        """Count the trace."""
        of = self.tenant, self.model
        counts.add(metrics.TRACES, *of, self.method, self.outcome)
        counts.add(metrics.INVOKES, *of, by=self.invokes)
        counts.add(metrics.TOKENS, *of, "prompt", by=self.prompt_tokens)
        counts.add(metrics.TOKENS, *of, "generated", by=self.generated_tokens)
        counts.add(metrics.SAVED_BYTES, *of, by=self.saved_bytes)
        counts.add(metrics.BLOCK_SECONDS, *of, by=self.block_seconds)
        for tier, steps in self.tiers.items():
            counts.add(metrics.STEPS, *of, tier, by=steps)
        counts.observe(metrics.QUEUE_SECONDS, *of, value=self.queued)
        counts.observe(metrics.RUNNING_SECONDS, *of, value=self.running)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the trace's line in the log."""
        return {
            "tenant": self.tenant,
            "model": self.model,
            "trace": self.trace,
            "session": self.session,
            "method": self.method,
            "outcome": self.outcome,
            "code": self.code,
            "invokes": self.invokes,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "saved_bytes": self.saved_bytes,
            "queued_seconds": round(self.queued, 4),
            "running_seconds": round(self.running, 4),
            "block_seconds": round(self.block_seconds, 6),
            "tiers": dict(self.tiers),
        }
