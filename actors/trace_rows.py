"""The traces of a session as operators see them."""

from __future__ import annotations

from actors.trace_run import TraceRun
from interpose.v1 import operator_pb2, service_pb2


def row_of(run: TraceRun, status: service_pb2.JobStatus) -> operator_pb2.TraceRow:
    """Return a trace as operators see it.

    Args:
        status: the state of the trace.
    """
    return operator_pb2.TraceRow(
        key=run.key,
        tenant=run.request.tenant,
        method=run.request.method,
        status=status,
        followed=bool(run.readers.followers),
    )
