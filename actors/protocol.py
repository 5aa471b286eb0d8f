"""The data that the ingress, the directory, the sessions and the engines exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from interpose.v1 import trace_pb2 as pb


@dataclass(frozen=True)
class Terms:
    """The rules for a session while it is lent.

    Attributes:
        retention_seconds: seconds that a finished trace's values are kept; in a kept session, seconds after their last use.
        stored_bytes: bytes that the session may hold. Beyond this, the values of the oldest finished traces are dropped, unless
            a client may come back for them. Then uploads, new traces and saves are refused.
        idle_seconds: seconds after which an unused session is closed; clients are told.
        counted: whether the session asks the account of its tenant before a trace starts or bytes are stored.
    """

    retention_seconds: float
    stored_bytes: int
    idle_seconds: float
    counted: bool = False


@dataclass(frozen=True)
class Lease:
    """A session that is lent to a client.

    Attributes:
        session_id: the session's id for the client.
        tenant: the tenant of the session.
        actor: handle of the session actor that holds this session among others.
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
class Route:
    """Where a trace runs.

    Attributes:
        target: the deployment that runs the trace.
        replica: the replica that the session's traces go to; "" for any.
        counted: whether Serve must see each trace as a call of its own, because it chooses the number of replicas by them.
    """

    target: Target
    replica: str = ""
    counted: bool = False


@dataclass(frozen=True)
class Work:
    """What traces have done that have ended.

    Attributes:
        traces: number of traces that began.
        tokens: tokens of prompts and generated tokens.
        saved_bytes: bytes of saved values.
    """

    traces: int = 0
    tokens: int = 0
    saved_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.traces + other.traces, self.tokens + other.tokens, self.saved_bytes + other.saved_bytes)


@dataclass(frozen=True)
class SessionStats:
    """What one session holds and does.

    Attributes:
        idle_seconds: seconds since the last call. 0 while a trace runs, or while the session keeps values that a client may
            come back for. Infinite when the client has left and no such value is there (any more).
        traces_running: traces that have not ended.
        done: the work of the session so far.
        stored_bytes: bytes that the session holds.
        collected: whether the client would lose nothing with the session: no trace runs, and all saved values have been fetched.
        owing: keys of the traces that have asked the account and have not settled.
    """

    idle_seconds: float
    traces_running: int
    done: Work
    stored_bytes: int
    collected: bool = False
    owing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StartFailed:
    """Why an engine replica does not start.

    Attributes:
        reason: the reason in words, for the operator.
        permanent: whether the next attempt would fail in the same way.
        attempt: names the deployed version and the node; another version or node may succeed.
    """

    reason: str
    permanent: bool
    attempt: str


@dataclass(frozen=True)
class ReplicaReport:
    """The state of one engine replica.

    Attributes:
        target: the deployment that the replica belongs to.
        model: the settings of the replica's model, a `ModelSettings`.
        stage: the loading stage in words; "" once the replica runs.
        healthy: whether the replica can take traces, or will when it has loaded.
        running: invokes that run on the replica.
        waiting: invokes that wait for another invoke of their trace.
        failed: why the replica does not start, if it does not.
        counters: what the replica's workers counted since they started, and what they hold (`executor.plugin.counters`).
    """

    target: Target
    model: Any
    replica: str
    stage: str
    healthy: bool
    running: int = 0
    waiting: int = 0
    failed: StartFailed | None = None
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Announced:
    """A model that an application of the cluster serves.

    Attributes:
        target: the deployment that holds the model's engine.
        model: the model's settings, a `ModelSettings`.
    """

    target: Target
    model: Any


@dataclass(frozen=True)
class ReplicaState:
    """The state of one replica of a model.

    Attributes:
        stage: the loading stage; "" once the replica runs.
        seconds: seconds since the stage, or the running, began.
        sessions: sessions whose traces go to the replica.
    """

    replica: str
    stage: str
    seconds: float
    running: int
    waiting: int
    sessions: int


@dataclass(frozen=True)
class ModelState:
    """The state of one model, over all its replicas.

    Attributes:
        state: LOADING, RUNNING, UNHEALTHY, or DRAINING if all that run take no new traces.
        replicas: number of running replicas.
        each: the replicas that run or load, by name.
        failed: why the last replica that failed to start failed, until a replica runs.
    """

    state: str
    replicas: int
    running: int
    waiting: int
    each: tuple[ReplicaState, ...] = ()
    failed: StartFailed | None = None

    @property
    def stages(self) -> tuple[tuple[str, float], ...]:
        """The stage of each loading replica, with the seconds since the stage began."""
        return tuple((one.stage, one.seconds) for one in self.each if one.stage)


@dataclass(frozen=True)
class TenantUsage:
    """What one tenant uses, over all its sessions.

    Attributes:
        traces_running: traces that have not ended, waiting traces included.
        traces_waiting: traces that wait for the tenant's quota of running traces.
        done: the work of the tenant so far.
        stored_bytes: bytes that the sessions hold.
        weight: the tenant's weight.
        quotas: each quota that the tenant has, with its use.
        refused: calls refused since the directory began, by quota.
    """

    name: str
    sessions: int
    traces_running: int
    traces_waiting: int
    done: Work
    stored_bytes: int
    weight: float
    quotas: tuple[pb.QuotaUse, ...]
    refused: Mapping[str, int]


@dataclass(frozen=True)
class DirectoryStatus:
    """Everything the directory knows."""

    models: dict[Target, ModelState]
    tenants: tuple[TenantUsage, ...]
    sessions: int
    warm: int
    uptime_seconds: float
