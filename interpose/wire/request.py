"""The `TraceRequest` that carries a trace from the ingress to an engine's workers.

The trace travels as the bytes that the client sent. A part of the service parses them only where it looks into the trace: the
ingress to check it, a session to put its variables into it, the engine to make requests of it, a worker to run it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from interpose.v1 import trace_pb2 as pb


@dataclass(frozen=True)
class TraceRequest:
    """One trace to run.

    Size: a message between processes.

    Attributes:
        trace: the serialized `Trace`. Clients choose its id.
        edits: the standing edits that the trace runs with, serialized `Edit`s.
        key: the trace's name inside the service, chosen by its session, or of a plain request by its ingress. Keys never collide.
        session: Ray name of the session actor, which takes saved bytes and printed text; "" for none. Of a plain request, the
            ingress that runs it (`actors.caller_watch.this_caller`).
        session_id: the session that the trace was submitted to.
        tenant: name of the tenant.
        trusted: whether the tenant may run code in the workers' own processes.
        share: part of an engine's places and cache that the tenant's traces may use at a time, from 0 to 1.
        weight: the tenant's weight beside other tenants.
        tokens: the most tokens that the trace may need, of its prompts and generated.
        trace_id: the trace's id, as the client chose it.
        accepted: the trace's first event, a serialized `Event` with `Accepted`.
        max_saved_bytes: bytes of all values that the trace may save.
        job: whether the trace runs to its end when no client reads its events.
        keep: whether a client may come back for the values until the retention time ends.
        stream: whether the trace's saves travel step by step.
        remotes: ids of the blobs of the session's earlier traces that the trace uses.
        variables: ids of the session variables that the trace shares.
        method: "trace", "job", "scan", "explain" or "openai".
        traceparent: the span that the trace belongs to, as W3C writes it; "" for none.
    """

    trace: bytes = field(repr=False)
    edits: tuple[bytes, ...] = field(default=(), repr=False)
    key: str = ""
    session: str = ""
    session_id: str = ""
    tenant: str = ""
    trusted: bool = False
    share: float = 1.0
    weight: float = 1.0
    tokens: int = 0
    trace_id: str = ""
    accepted: bytes = field(default=b"", repr=False)
    max_saved_bytes: int = 0
    job: bool = False
    keep: bool = False
    stream: bool = False
    remotes: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()
    method: str = "trace"
    traceparent: str = ""

    @property
    def size(self) -> int:
        """Bytes of the trace and its standing edits."""
        return len(self.trace) + sum(map(len, self.edits))

    def parse(self) -> pb.Trace:
        """Return the trace under its key, with its standing edits as `Trace.applied`."""
        return parse_trace(self.trace, self.edits, self.key)


def new_key(trace_id: str) -> str:
    """Return a key for a trace: a name that nothing else has, and that a client cannot guess."""
    return f"{uuid.uuid4().hex[:12]}.{trace_id}"


def parse_trace(data: bytes, edits: Iterable[bytes], key: str) -> pb.Trace:
    """Return a trace with another id, and with its standing edits.

    Args:
        data: the serialized `Trace`.
        edits: serialized `Edit`s.
        key: the id that the trace gets.
    """
    trace = pb.Trace.FromString(data)
    trace.id = key
    trace.applied.extend(pb.Edit.FromString(edit) for edit in edits)
    return trace
