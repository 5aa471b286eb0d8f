"""Follows how far a trace has come, from its events: its usage, and the state of a job."""

from __future__ import annotations

import time
from collections import Counter

from actors.telemetry.record import TraceRecord
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest


class TraceProgress:
    """Counts the events of one trace.

    Args:
        accepted: the message that told the client that the trace was accepted.

    Attributes:
        failure: the first failure, of an invoke or of the whole trace.
        ended_at: when the last event came, on the monotonic clock; None before.
        tiers: the steps of the blocks that have ended, in each tier.
        block_seconds: the seconds for which forward passes waited for these blocks.
    """

    def __init__(self, accepted: pb.Accepted) -> None:
        self._accepted = accepted
        self._submitted_at = time.monotonic()
        self._started_at: float | None = None
        self._finished: set[int] = set()
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self.failure: pb.Failure | None = None
        self.ended_at: float | None = None
        self.tiers: Counter[str] = Counter()
        self.block_seconds = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the prompts and generated tokens so far."""
        return self._prompt_tokens + self._generated_tokens

    def begin(self) -> None:
        """Note that an event came from the engine."""
        if self._started_at is None:
            self._started_at = time.monotonic()

    def generated(self, output: pb.Output) -> None:
        """Count an output that came from the engine."""
        self._prompt_tokens += len(output.prompt_token_ids)
        self._generated_tokens += len(output.token_ids)
        if output.finished:
            self._finished.add(output.invoke)

    def failed(self, failed: pb.Failure) -> None:
        """Count an invoke that failed."""
        self._finished.add(failed.invoke)
        self.failure = self.failure or failed

    def accounted(self, accounting: pb.Accounting) -> None:
        """Take the account of an invoke that has ended.

        Outputs of an invoke may come together at its end, but its account says when it began.
        """
        began = max(self._submitted_at, time.monotonic() - accounting.seconds)
        if self._started_at is None or began < self._started_at:
            self._started_at = began
        for count in accounting.tiers:
            self.tiers[count.tier] += count.steps
        self.block_seconds += accounting.block_seconds

    def end(self, failure: pb.Failure | None) -> None:
        """Note that no more events will come.

        Args:
            failure: why the trace as a whole failed, if it did.
        """
        self.ended_at = time.monotonic()
        self.failure = failure or self.failure

    def move(self, seconds: float) -> None:
        """Add `seconds` to all times, for a process with another monotonic clock."""
        self._submitted_at += seconds
        if self._started_at is not None:
            self._started_at += seconds
        if self.ended_at is not None:
            self.ended_at += seconds

    def usage(self) -> pb.Usage:
        """Return what the trace cost; the caller adds the saved bytes."""
        now = time.monotonic()
        started_at = self._started_at or now
        return pb.Usage(
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            seconds_queued=started_at - self._submitted_at,
            seconds_running=now - started_at,
        )

    def status(self, stored_bytes: int, expires_at: float | None) -> service_pb2.JobStatus:
        """Return the state of the trace for a client.

        Args:
            stored_bytes: bytes that the trace keeps.
            expires_at: when the trace's values expire, on the monotonic clock; None while the trace runs.
        """
        now = time.monotonic()
        status = service_pb2.JobStatus(
            session_id=self._accepted.session_id,
            trace_id=self._accepted.trace_id,
            model=self._accepted.model,
            state=self._state(),
            invokes=self._accepted.invokes,
            finished_invokes=len(self._finished),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            stored_bytes=stored_bytes,
            seconds_since_submitted=now - self._submitted_at,
            seconds_since_started=0.0 if self._started_at is None else now - self._started_at,
            seconds_since_ended=0.0 if self.ended_at is None else now - self.ended_at,
            seconds_left=0.0 if expires_at is None else max(0.0, expires_at - now),
        )
        if self.failure is not None:
            status.failure.CopyFrom(self.failure)
        return status

    def record(self, request: TraceRequest, saved_bytes: int) -> TraceRecord:
        """Return what is known of a trace that has ended, or is about to end as cancelled."""
        usage = self.usage()
        state = self._state()
        outcome = {service_pb2.JOB_STATE_DONE: "done", service_pb2.JOB_STATE_FAILED: "failed"}.get(state, "cancelled")
        return TraceRecord(
            tenant=request.tenant,
            model=self._accepted.model,
            session=request.session_id,
            trace=request.trace_id,
            method=request.method,
            outcome=outcome,
            code=pb.ErrorCode.Name(self.failure.code).removeprefix("ERROR_CODE_") if self.failure is not None else "",
            invokes=self._accepted.invokes,
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.generated_tokens,
            saved_bytes=saved_bytes,
            queued=usage.seconds_queued,
            running=usage.seconds_running,
            tiers=dict(self.tiers),
            block_seconds=self.block_seconds,
        )

    def _state(self) -> service_pb2.JobState:
        if self.ended_at is None:
            return service_pb2.JOB_STATE_QUEUED if self._started_at is None else service_pb2.JOB_STATE_RUNNING
        if self.failure is None:
            return service_pb2.JOB_STATE_DONE
        cancelled = self.failure.code == pb.ERROR_CODE_CANCELLED
        return service_pb2.JOB_STATE_CANCELLED if cancelled else service_pb2.JOB_STATE_FAILED
