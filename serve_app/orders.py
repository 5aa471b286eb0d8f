"""From an admitted trace to the order that a session gets."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from actors.protocol import Order, Target
from actors.saved import Saved
from interpose.v1 import trace_pb2 as pb
from serve_app.settings import ModelSettings

# What a block can change in place, so that its new contents come back under its index in the trace's scope.
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
        remotes: ids of the blobs of earlier traces of the session that it uses.
        foreign: those of other sessions, by id.
        edits: the standing edits that it names, serialized.
        session_id: of the lease under which it runs.
        target: where it runs.
        replica: at which replica of it, "" for any.
        job: whether it goes on when its client goes.
        tenant: whose it is.
        share: of an engine that the tenant may use.
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
    """The names of the containers in the scope, for whoever attaches to the trace and has no objects of that name."""
    seen: set[tuple[str, int]] = set()
    for bindings in (trace.shared, *(invoke.program.reads for invoke in trace.invokes)):
        for binding in bindings:
            name, index = binding.name, binding.value.ref
            if binding.value.WhichOneof("kind") != "ref" or (name, index) in seen:
                continue
            seen.add((name, index))
            if index < len(trace.scope.values) and trace.scope.values[index].WhichOneof("kind") in _CONTAINERS:
                yield pb.CapturedName(name=name, index=index)
