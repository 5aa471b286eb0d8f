"""Turns an admitted trace into the request that travels on to its session and its engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest
from serve_app.ingress.calls import Caller
from serve_app.models import ServedModel
from serve_app.settings import ModelSettings, Tenant
from serve_app.tenants.admission import Remotes

# Kinds of values that a block can change in place. Their new contents come back under their index in the trace's scope.
_CONTAINERS = ("list", "dict", "set")


class Submitted(NamedTuple):
    """A trace that has passed the checks.

    Attributes:
        message: what the client sent.
        trace: the trace in it.
        remotes: the blobs of earlier traces that the trace uses.
        caller: what the call's metadata says.
    """

    message: service_pb2.UnparsedSubmit
    trace: pb.Trace
    tenant: Tenant
    served: ServedModel
    remotes: Remotes
    caller: Caller


def method_of(trace: pb.Trace, job: bool) -> str:
    """Return "trace", "job", "scan", "explain" or "openai"."""
    if trace.HasField("openai"):
        return "openai"
    if trace.scan:
        return "explain" if trace.explain else "scan"
    return "job" if job else "trace"


def request_of(
    data: bytes,
    trace: pb.Trace,
    model: ModelSettings,
    session_id: str,
    *,
    tenant: str = "",
    trusted: bool = False,
    share: float = 1.0,
    weight: float = 1.0,
    tokens: int = 0,
    job: bool = False,
    edits: tuple[bytes, ...] = (),
    remotes: tuple[str, ...] = (),
    traceparent: str = "",
) -> TraceRequest:
    """Return the request to run a trace.

    Args:
        data: the trace as the client sent it.
        trace: the same, parsed.
        model: the settings of the trace's model.
        session_id: the session that runs the trace.
        tenant, trusted, share, weight, tokens, job, edits, remotes, traceparent: as in `TraceRequest`.
    """
    accepted = pb.Accepted(trace_id=trace.id, session_id=session_id, model=model.name, invokes=len(trace.invokes))
    accepted.captured.extend(_captured(trace))
    return TraceRequest(
        trace=data,
        edits=edits,
        session_id=session_id,
        tenant=tenant,
        trusted=trusted,
        share=share,
        weight=weight,
        tokens=tokens,
        trace_id=trace.id,
        accepted=pb.Event(accepted=accepted).SerializeToString(),
        max_saved_bytes=model.limits.max_saved_bytes,
        job=job,
        keep=job or trace.remote,
        stream=trace.stream,
        remotes=remotes,
        variables=frozenset(variable.id for variable in trace.variables),
        method=method_of(trace, job),
        traceparent=traceparent,
    )


def _captured(trace: pb.Trace) -> Iterator[pb.CapturedName]:
    """Yield the names of the containers in the trace's scope.

    A client that attaches to the trace later has no objects of these names.
    """
    seen: set[tuple[str, int]] = set()
    for bindings in (trace.shared, *(invoke.program.reads for invoke in trace.invokes)):
        for binding in bindings:
            name, index = binding.name, binding.value.ref
            if binding.value.WhichOneof("kind") != "ref" or (name, index) in seen:
                continue
            seen.add((name, index))
            if index < len(trace.scope.values) and trace.scope.values[index].WhichOneof("kind") in _CONTAINERS:
                yield pb.CapturedName(name=name, index=index)
