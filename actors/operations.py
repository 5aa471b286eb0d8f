"""What the directory does for operators.

It exports metrics, lists and cancels traces, drains replicas, and tells the usage.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from actors.leases import Leases
from actors.protocol import ReplicaReport, SessionStats, Target
from actors.replicas import ReplicaBoard
from actors.session_pool import SessionPool
from actors.telemetry import metrics
from actors.telemetry.counts import Counted, Counts
from actors.telemetry.export import Exporter
from actors.telemetry.metrics import Metric
from interpose.v1 import operator_pb2

# The counters and gauges of a replica's workers, by the names of `executor.plugin.counters`, with the labels after the model.
WORKER_COUNTERS: dict[str, tuple[Metric, tuple[str, ...]]] = {
    "sandbox_starts": (metrics.SANDBOX_STARTS, ()),
    "sandbox_kills": (metrics.SANDBOX_KILLS, ()),
    "graphs_captured": (metrics.GRAPH_CAPTURES, ("captured",)),
    "graphs_failed": (metrics.GRAPH_CAPTURES, ("failed",)),
    "graphs_mismatched": (metrics.GRAPH_CAPTURES, ("mismatched",)),
    "graphs_evicted": (metrics.GRAPH_EVICTIONS, ()),
    "steps_in_graphs": (metrics.GRAPH_STEPS, ("graph",)),
    "steps_eager": (metrics.GRAPH_STEPS, ("eager",)),
}
WORKER_GAUGES = {"graphs": metrics.GRAPHS, "graph_bytes": metrics.GRAPH_BYTES}

MOST_ROWS = 1000


class Operations:
    """The operator's side of the directory.

    Args:
        board: the replicas.
    """

    def __init__(self, board: ReplicaBoard) -> None:
        self._board = board
        self._exporter = Exporter()
        self._begun = time.monotonic()
        self._reported: dict[str, Mapping[str, float]] = {}  # the counters of each replica, as last reported

    def take(self, counted: Counted) -> None:
        """Take what a process counted."""
        if counted:
            self._exporter.enter(counted)

    def reported(self, report: ReplicaReport) -> None:
        """Take the counters of a replica's workers, which count from the replica's start."""
        before = self._reported.get(report.replica, {})
        counts = Counts()
        for name, (metric, labels) in WORKER_COUNTERS.items():
            counts.add(metric, report.model.name, *labels, by=report.counters.get(name, 0.0) - before.get(name, 0.0))
        self._reported[report.replica] = report.counters
        self.take(counts.take())

    async def look(self, pool: SessionPool, leases: Leases, stats: Mapping[str, SessionStats]) -> None:
        """Collect what session actors counted, and export what tenants and replicas hold now.

        Args:
            stats: what each session holds and does, by session id.
        """
        await pool.collect()
        hold = self._exporter.hold
        running: Counter[tuple[str, ...]] = Counter()
        stored: Counter[tuple[str, ...]] = Counter()
        for lease in leases.all:
            if lease.session_id in stats:
                running[lease.tenant,] += stats[lease.session_id].traces_running
                stored[lease.tenant,] += stats[lease.session_id].stored_bytes
        hold(metrics.SESSIONS, Counter((lease.tenant,) for lease in leases.all))
        hold(metrics.RUNNING, running)
        hold(metrics.STORED_BYTES, stored)
        hold(metrics.ACTORS, {(): pool.ready})
        self._look_at_replicas()

    def _look_at_replicas(self) -> None:
        replicas: Counter[tuple[str, ...]] = Counter()
        invokes: Counter[tuple[str, ...]] = Counter()
        gauges: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in WORKER_GAUGES}
        reports = self._board.reports()
        for report, state in reports:
            name = report.model.name
            replicas[name, state] += 1
            invokes[name, "running"] += report.running
            invokes[name, "waiting"] += report.waiting
            for gauge, values in gauges.items():
                values[name,] += report.counters.get(gauge, 0.0)  # type: ignore[assignment]
        self._exporter.hold(metrics.REPLICAS, replicas)
        self._exporter.hold(metrics.ENGINE_INVOKES, invokes)
        for gauge, values in gauges.items():
            self._exporter.hold(WORKER_GAUGES[gauge], values)
        there = {report.replica for report, _ in reports}
        self._reported = {replica: counters for replica, counters in self._reported.items() if replica in there}

    async def traces(self, pool: SessionPool, tenant: str, model: str, most: int) -> operator_pb2.ListTracesReply:
        """Return the traces that wait or run, the oldest first.

        Args:
            tenant, model: whose; "" for all.
            most: traces in the reply.
        """
        answers = await pool.ask_all("traces")
        rows = [operator_pb2.TraceRow.FromString(data) for answer in answers for data in answer]
        rows = [row for row in rows if tenant in ("", row.tenant) and model in ("", row.status.model)]
        rows.sort(key=lambda row: -row.status.seconds_since_submitted)
        return operator_pb2.ListTracesReply(traces=rows[: min(most, MOST_ROWS)], total=len(rows))

    async def cancel(self, pool: SessionPool, key: str) -> bool:
        """Cancel a trace by its key; return whether it was running."""
        return any(await pool.ask_all("cancel_key", key))

    async def drain(
        self, pool: SessionPool, target: Target | None, model: str, replica: str, end: bool
    ) -> operator_pb2.DrainReply | None:
        """Make replicas take no new traces, or take them again.

        Args:
            target, model: the deployment and the name of the model; None and "" for the service.
            replica: a replica of the model, "" for all.
            end: whether they take traces again.

        Returns:
            What is draining now; None if the model has no such replica.
        """
        if not self._board.drain(target, replica, end):
            return None
        if replica:
            running = sum(
                report.running + report.waiting for report, _ in self._board.reports() if report.replica == replica
            )
        else:
            running = (await self.traces(pool, "", model, 0)).total
        return operator_pb2.DrainReply(draining=self._board.draining, running=running)

    def usage(self, tenant: str) -> operator_pb2.GetUsageReply:
        """Return what tenants have used since this directory began.

        Args:
            tenant: whose usage; "" for all.
        """
        book = self._exporter.book
        rows: dict[tuple[str, str], operator_pb2.UsageRow] = {}

        def of(labels: tuple[str, ...]) -> operator_pb2.UsageRow:
            key = labels[0], labels[1]
            return rows.setdefault(key, operator_pb2.UsageRow(tenant=key[0], model=key[1]))

        for labels, value in book.of(metrics.TRACES):
            row = of(labels)
            row.traces += int(value)
            row.failed += int(value) if labels[3] == "failed" else 0
            row.cancelled += int(value) if labels[3] == "cancelled" else 0
        for labels, value in book.of(metrics.TOKENS):
            row = of(labels)
            if labels[2] == "prompt":
                row.prompt_tokens += int(value)
            else:
                row.generated_tokens += int(value)
        for labels, value in book.of(metrics.STEPS):
            of(labels).steps += int(value)
        for labels, value in book.of(metrics.INVOKES):
            of(labels).invokes += int(value)
        for labels, value in book.of(metrics.SAVED_BYTES):
            of(labels).saved_bytes += int(value)
        for field, metric in (
            ("queue_seconds", metrics.QUEUE_SECONDS),
            ("running_seconds", metrics.RUNNING_SECONDS),
            ("block_seconds", metrics.BLOCK_SECONDS),
        ):
            for labels, value in book.of(metric):
                setattr(of(labels), field, value)
        refusals = (
            operator_pb2.RefusalRow(
                tenant=labels[0], method=labels[1], code=labels[2], limit=labels[3], count=int(value)
            )
            for labels, value in book.of(metrics.REFUSALS)
        )
        return operator_pb2.GetUsageReply(
            seconds=time.monotonic() - self._begun,
            rows=_of_tenant(rows.values(), tenant),
            refusals=_of_tenant(refusals, tenant),
        )


def _of_tenant(rows: Iterable[operator_pb2.UsageRow | operator_pb2.RefusalRow], tenant: str) -> list:
    """Return the rows of a tenant in order; all rows for ""."""
    found = [row for row in rows if tenant in ("", row.tenant)]
    return sorted(found, key=lambda row: (row.tenant, getattr(row, "model", "") or getattr(row, "method", "")))
