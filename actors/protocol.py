"""What the ingress, the directory, the sessions and the engines hand each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.saved import Saved


@dataclass(frozen=True)
class Terms:
    """What holds for a session while it is lent.

    Attributes:
        retention_seconds: a finished trace's values are kept this long; in a kept session, this long after its last use.
        stored_bytes: beyond this, the values of the oldest finished traces go first, unless somebody may come back for
            them; then uploads, new traces and saves are refused.
        idle_seconds: an unused session is closed after this; told to clients.
    """

    retention_seconds: float
    stored_bytes: int
    idle_seconds: float


@dataclass(frozen=True)
class Lease:
    """A session lent to a client.

    Attributes:
        session_id: what the client knows it by.
        tenant: whose it is.
        actor: handle of the session actor that holds it, among others.
    """

    session_id: str
    tenant: str
    actor: Any


@dataclass(frozen=True)
class Target:
    """The Serve deployment that holds a model's engine."""

    app: str
    deployment: str


@dataclass(frozen=True)
class Order:
    """One trace to run.

    Attributes:
        session_id: of the lease under which it was submitted.
        follower: who will read the events; a trace without a follower is cancelled, unless it is a job.
        trace: the serialized `Trace`.
        accepted: the serialized `Accepted` that its events begin with.
        target: where it runs.
        replica: which of its replicas the session's traces go to; "" for any.
        tenant: whose it is.
        share: of an engine's places and cache that the tenant's traces may use at a time, from 0 to 1.
        max_saved_bytes: of all that it saves.
        job: it runs to its end whoever follows.
        keep: somebody may come back for its values until the retention time ends.
        remotes: ids of the blobs of earlier traces of the session that it uses.
        foreign: the same of other sessions of the tenant, by id.
        variables: ids of what it shares with other traces of the session.
        edits: the standing edits that it runs with, serialized `Edit`s.
    """

    session_id: str
    follower: str
    trace_id: str
    trace: bytes = field(repr=False)
    accepted: bytes = field(repr=False)
    target: Target
    max_saved_bytes: int
    job: bool = False
    keep: bool = False
    remotes: tuple[str, ...] = ()
    foreign: tuple[tuple[str, Saved], ...] = ()
    variables: frozenset[str] = frozenset()
    edits: tuple[bytes, ...] = field(default=(), repr=False)
    replica: str = ""
    tenant: str = ""
    share: float = 1.0


@dataclass(frozen=True)
class SessionStats:
    """What one session holds and does.

    Attributes:
        idle_seconds: since anything was asked of it; 0 while a trace runs, or while it keeps what somebody may come back
            for; infinite when its client has left and nothing of the kind is there (any more).
        collected: whether its client would miss nothing of it: no trace runs, and what it saved has been fetched.
    """

    idle_seconds: float
    traces_running: int
    traces_done: int
    stored_bytes: int
    collected: bool = False


@dataclass(frozen=True)
class StartFailed:
    """Why an engine replica does not start.

    Attributes:
        reason: in words, for the operator.
        permanent: whether the next try would fail in the same way.
        attempt: names the deployed version and the node; another version or node may do better.
    """

    reason: str
    permanent: bool
    attempt: str


@dataclass(frozen=True)
class ReplicaReport:
    """How one engine replica is.

    Attributes:
        target: the deployment that it belongs to.
        model: the settings of the model that it serves, a `ModelSettings`.
        stage: what it does while it loads, in words; "" once it runs.
        healthy: whether it can take traces, or will be able to when it has loaded.
        running: invokes that it runs.
        waiting: invokes that wait for another one of their trace.
        failed: why it does not start, if it does not.
    """

    target: Target
    model: Any
    replica: str
    stage: str
    healthy: bool
    running: int = 0
    waiting: int = 0
    failed: StartFailed | None = None


@dataclass(frozen=True)
class Announced:
    """A model that some application of the cluster serves.

    Attributes:
        target: the deployment that holds its engine.
        model: its settings, a `ModelSettings`.
    """

    target: Target
    model: Any


@dataclass(frozen=True)
class ReplicaState:
    """How one replica of a model is.

    Attributes:
        stage: what it does while it loads; "" once it runs.
        seconds: since the stage, or the running, began.
        sessions: whose traces go to it.
    """

    replica: str
    stage: str
    seconds: float
    running: int
    waiting: int
    sessions: int


@dataclass(frozen=True)
class ModelState:
    """How one model is, over all its replicas.

    Attributes:
        state: LOADING, RUNNING or UNHEALTHY.
        replicas: how many run.
        each: those that run or load, by name.
        failed: why the last one that did not start did not, until one runs.
    """

    state: str
    replicas: int
    running: int
    waiting: int
    each: tuple[ReplicaState, ...] = ()
    failed: StartFailed | None = None

    @property
    def stages(self) -> tuple[tuple[str, float], ...]:
        """What each loading replica does, with the seconds since it began."""
        return tuple((one.stage, one.seconds) for one in self.each if one.stage)


@dataclass(frozen=True)
class TenantUsage:
    """What one tenant uses, over all its sessions."""

    name: str
    sessions: int
    traces_running: int
    traces_done: int
    stored_bytes: int


@dataclass(frozen=True)
class DirectoryStatus:
    """Everything the directory knows."""

    models: dict[Target, ModelState]
    tenants: tuple[TenantUsage, ...]
    sessions: int
    warm: int
    uptime_seconds: float
