"""How far a trace is: what it waited, what it ran, and what it came to."""

from __future__ import annotations

import time

from actors.trace_progress import TraceProgress
from interpose.contract.errors import failure
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest

REQUEST = TraceRequest(b"", tenant="red", session_id="s", trace_id="t", method="job")


def progress(submitted: float = 0.0) -> TraceProgress:
    """A trace that was submitted some seconds ago."""
    made = TraceProgress(pb.Accepted(trace_id="t", model="tiny", invokes=2))
    made.move(-submitted)
    return made


def test_a_trace_whose_outputs_come_at_its_end_did_not_wait_so_long() -> None:
    trace = progress(10.0)
    trace.begin()
    assert 9.9 < trace.usage().seconds_queued < 11.0
    trace.accounted(pb.Accounting(seconds=4.0))
    trace.accounted(pb.Accounting(seconds=3.0))
    usage = trace.usage()
    assert 5.5 < usage.seconds_queued < 6.5 and 3.9 < usage.seconds_running < 5.0


def test_no_block_began_before_its_trace_was_submitted() -> None:
    trace = progress(1.0)
    trace.accounted(pb.Accounting(seconds=1e9))
    assert trace.usage().seconds_queued == 0.0


def test_the_record_has_what_the_invokes_came_to() -> None:
    trace = progress()
    trace.accounted(
        pb.Accounting(tiers=[pb.TierCount(tier="plan", steps=3), pb.TierCount(tier="block", steps=1, why="a")])
    )
    trace.accounted(pb.Accounting(tiers=[pb.TierCount(tier="block", steps=2, why="b")], block_seconds=0.5))
    trace.generated(pb.Output(prompt_token_ids=[1, 2], token_ids=[3], invoke=0, finished=True))
    trace.end(None)
    record = trace.record(REQUEST, 7)
    assert (record.tenant, record.model, record.session, record.trace, record.method) == (
        "red",
        "tiny",
        "s",
        "t",
        "job",
    )
    assert (record.outcome, record.code, record.invokes, record.saved_bytes) == ("done", "", 2, 7)
    assert record.tiers == {"plan": 3, "block": 3} and record.block_seconds == 0.5
    assert (record.prompt_tokens, record.generated_tokens) == (2, 1)


def test_a_failed_and_a_cancelled_trace() -> None:
    trace = progress()
    trace.failed(failure(pb.ERROR_CODE_INTERVENTION, "the user's", invoke=1))
    trace.end(None)
    assert (trace.record(REQUEST, 0).outcome, trace.record(REQUEST, 0).code) == ("failed", "INTERVENTION")
    trace = progress()
    trace.end(failure(pb.ERROR_CODE_CANCELLED, "cancelled"))
    assert (trace.record(REQUEST, 0).outcome, trace.record(REQUEST, 0).code) == ("cancelled", "CANCELLED")
    assert time.monotonic() >= (trace.ended_at or 0.0)
