"""Turns an admitted trace into the order that a session gets."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from actors.protocol import Order, Target
from actors.saved import Saved
from interpose.v1 import trace_pb2 as pb
from serve_app.settings import ModelSettings

# Kinds of values that a block can change in place. Their new contents come back under their index in the trace's scope.
_CONTAINERS = ("list", "dict", "set")


def order_of(
    trace: pb.Trace,
    remotes: tuple[str, ...],
    foreign: tuple[tuple[str, Saved], ...],
    edits: tuple[bytes, ...],
    session_id: str,
    model: ModelSettings,
    target: Target,
    replica: str,
    job: bool,
    tenant: str = "",
    share: float = 1.0,
) -> Order:
    """Return the order to run a trace.

    Args:
        remotes: ids of the blobs of the session's earlier traces that this trace uses.
        foreign: blobs of the tenant's other sessions that this trace uses, by id.
        edits: the standing edits that the trace names, serialized.
        session_id: the session that runs the trace.
        target: the deployment that runs the trace.
        replica: the replica of the deployment; "" for any.
        job: whether the trace goes on when its client goes.
        tenant: name of the tenant.
        share: the part of an engine that the tenant may use, from 0 to 1.
    """
    accepted = pb.Accepted(trace_id=trace.id, session_id=session_id, model=model.name, invokes=len(trace.invokes))
    accepted.captured.extend(_captured(trace))
    return Order(
        session_id=session_id,
        follower=uuid.uuid4().hex,
        trace_id=trace.id,
        trace=trace.SerializeToString(),
        accepted=accepted.SerializeToString(),
        target=target,
        max_saved_bytes=model.limits.max_saved_bytes,
        job=job,
        keep=job or trace.remote,
        remotes=remotes,
        foreign=foreign,
        variables=frozenset(variable.id for variable in trace.variables),
        edits=edits,
        replica=replica,
        tenant=tenant,
        share=share,
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
