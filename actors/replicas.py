"""The last report of each engine replica, and the replica of each session.

A replica that stops reporting is taken for gone.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from actors.protocol import Announced, ModelState, ReplicaReport, ReplicaState, StartFailed, Target

# Replicas report every second. A killed replica reports no more. A busy machine can delay a report for some seconds.
SILENCE_SECONDS = 20.0
# While a replica imports and loads, its event loop gets the interpreter only now and then.
LOADING_SILENCE_SECONDS = 30.0
# Seconds that a model is known after its replicas stopped reporting: it is unavailable, not unknown.
ABSENCE_SECONDS = 90.0
# Serve starts a failed replica again, some times. New attempts are told of a permanent failure for this long.
FAILURE_SECONDS = 60.0


@dataclass
class _Seen:
    report: ReplicaReport
    at: float
    stage_since: float
    workers: dict[int, str] = field(default_factory=dict)  # the loading stage of each worker, by rank
    given: int = 0  # sessions assigned since the last report, so that simultaneous sessions do not all get this replica
    lost: bool = False  # whether the replica was found dead

    @property
    def healthy(self) -> bool:
        return self.report.healthy and not self.lost and not self.silent

    @property
    def silent(self) -> bool:
        return time.monotonic() - self.at > (LOADING_SILENCE_SECONDS if self.report.stage else SILENCE_SECONDS)

    @property
    def takes_traces(self) -> bool:
        return self.healthy and not self.report.stage

    @property
    def stage(self) -> str:
        """The stage of a loading replica and of its workers; "" once it runs."""
        workers = ", ".join(f"worker {rank}: {stage}" for rank, stage in sorted(self.workers.items()))
        return f"{self.report.stage} ({workers})" if self.report.stage and workers else self.report.stage


@dataclass
class _Failure:
    failed: StartFailed
    model: Any
    at: float


@dataclass
class Drain:
    """What takes no new traces.

    Attributes:
        service: whether nothing does.
        targets: models, by their deployments.
        replicas: replicas, by name.
    """

    service: bool = False
    targets: set[Target] = field(default_factory=set)
    replicas: set[str] = field(default_factory=set)

    def holds(self, report: ReplicaReport) -> bool:
        """Whether a replica takes no new traces."""
        return self.service or report.target in self.targets or report.replica in self.replicas


class ReplicaBoard:
    """The last report of every replica, and the replica of every session."""

    def __init__(self) -> None:
        self._failures: dict[Target, _Failure] = {}
        self._ran: dict[Target, Any] = {}  # the settings with which a replica of a deployment has run
        self._seen: dict[str, _Seen] = {}
        self._placements: dict[tuple[str, Target], str] = {}
        self._drain = Drain()

    def report(self, report: ReplicaReport) -> str:
        """Store a replica's report in place of its last report.

        Returns:
            Why the replica must not serve: another application serves a model of that name. "" if it may serve.
        """
        now = time.monotonic()
        self._drop_silent(now)
        for one in self._seen.values():
            other = one.report
            if other.model.name == report.model.name and other.target != report.target and one.healthy:
                return (
                    f"a model with the name {report.model.name!r} is served by the application {other.target.app!r} "
                    "already: give this one another `name`"
                )
        self._note_start(report, now)
        last = self._seen.get(report.replica)
        same = last is not None and last.report.stage == report.stage
        workers = last.workers if last is not None else {}
        self._seen[report.replica] = _Seen(report, now, last.stage_since if same and last else now, workers)
        return ""

    def _note_start(self, report: ReplicaReport, now: float) -> None:
        target, failed = report.target, report.failed
        if report.healthy and not report.stage:
            self._ran[target] = report.model
            self._failures.pop(target, None)
        elif failed is not None:
            # The same settings have run before: the failure has a cause outside them, which may go.
            if self._ran.get(target) == report.model:
                failed = dataclasses.replace(failed, permanent=False)
            known = self.start_failure(target, report.model, failed.attempt)
            if known is None or known != failed:
                self._failures[target] = _Failure(failed, report.model, now)

    def start_failure(self, target: Target, model: Any, attempt: str) -> StartFailed | None:
        """Return why a replica with these settings failed to start a moment ago.

        None if the next attempt may succeed.
        """
        one = self._failures.get(target)
        if one is None or not one.failed.permanent or time.monotonic() - one.at > FAILURE_SECONDS:
            return None
        return one.failed if (one.model, one.failed.attempt) == (model, attempt) else None

    def worker(self, replica: str, rank: int, stage: str) -> None:
        """Note the stage of a replica's worker; ignored for a replica without a report."""
        if replica in self._seen:
            self._seen[replica].workers[rank] = stage

    def lost(self, replica: str) -> None:
        """Note that a replica is dead: it gets no calls unless it reports again."""
        if replica in self._seen:
            self._seen[replica].lost = True

    def announced(self) -> tuple[Announced, ...]:
        """Return the models that have replicas, whatever state the replicas are in.

        While replicas are replaced by replicas with other settings, the newest replica that takes traces decides.
        """
        self._drop_silent(time.monotonic())
        found: dict[Target, _Seen] = {}
        for one in self._seen.values():  # the oldest first
            known = found.get(one.report.target)
            if known is None or one.takes_traces >= known.takes_traces:
                found[one.report.target] = one
        return tuple(Announced(target, one.report.model) for target, one in found.items())

    def state(self, target: Target) -> ModelState:
        """Return the state of a deployment.

        RUNNING with one replica that can work, LOADING if a replica is about to.
        """
        now = time.monotonic()
        self._drop_silent(now)
        healthy = [one for one in self._seen.values() if one.report.target == target and one.healthy]
        running = [one.report for one in healthy if one.takes_traces]
        sessions = Counter(self._placements.values())
        state = "RUNNING" if running else "LOADING" if healthy else "UNHEALTHY"
        if running and all(self._drain.holds(report) for report in running):
            state = "DRAINING"
        return ModelState(
            state=state,
            replicas=len(running),
            running=sum(report.running for report in running),
            waiting=sum(report.waiting for report in running),
            each=tuple(
                ReplicaState(
                    report.replica, one.stage, now - one.stage_since, report.running, report.waiting,
                    sessions[report.replica],
                )
                for one in healthy
                for report in (one.report,)
            ),
            failed=self._failures[target].failed if target in self._failures else None,
        )  # fmt: skip

    # Sessions

    def place(self, session_id: str, target: Target) -> str:
        """Return the replica that a session's traces go to; "" if there is none.

        A session keeps its replica while the replica can work. A session without a replica gets the replica with the least to do;
        among equal replicas, the replica with the fewest sessions.
        """
        self._drop_silent(time.monotonic())
        able = {
            name: one
            for name, one in self._seen.items()
            if one.report.target == target and one.takes_traces and not self._drain.holds(one.report)
        }
        key = (session_id, target)
        if self._placements.get(key) in able:
            return self._placements[key]
        if not able:
            return ""
        sessions = Counter(self._placements.values())

        def busy(name: str) -> tuple[int, int, str]:
            report = able[name].report
            return report.running + report.waiting + able[name].given, sessions[name], name

        chosen = min(able, key=busy)
        able[chosen].given += 1
        self._placements[key] = chosen
        return chosen

    def moved(self, session_id: str, target: Target, replica: str) -> None:
        """Note that another replica has taken a session's trace.

        The session's former replica no longer takes its traces.
        """
        if (session_id, target) in self._placements:
            self._placements[session_id, target] = replica

    def left(self, session_id: str) -> None:
        """Note that a session has ended."""
        for key in [key for key in self._placements if key[0] == session_id]:
            del self._placements[key]

    # The operator's side

    def drain(self, target: Target | None, replica: str, end: bool) -> bool:
        """Make replicas take no new traces, or take them again.

        Args:
            target: the deployment; None for all deployments.
            replica: a replica of the deployment, "" for all.
            end: whether they take traces again.

        Returns:
            Whether the deployment has such a replica.
        """
        self._drop_silent(time.monotonic())
        drain = self._drain
        drain.replicas &= self._seen.keys()
        if target is None:
            drain.service = not end
        elif not replica:
            (drain.targets.discard if end else drain.targets.add)(target)
        elif replica in self._seen and self._seen[replica].report.target == target:
            (drain.replicas.discard if end else drain.replicas.add)(replica)
        else:
            return False
        return True

    @property
    def draining(self) -> list[str]:
        """What takes no new traces: "service", models by name, and replicas as "model/replica"."""
        drain = self._drain
        names = {one.report.target: one.report.model.name for one in self._seen.values()}
        replicas = (self._seen[name].report for name in drain.replicas if name in self._seen)
        return [
            *(["service"] if drain.service else []),
            *sorted(str(names.get(target, target.deployment)) for target in drain.targets),
            *sorted(f"{report.model.name}/{report.replica}" for report in replicas),
        ]

    @property
    def closed(self) -> bool:
        """Whether the service takes no new traces."""
        return self._drain.service

    def reports(self) -> list[tuple[ReplicaReport, str]]:
        """Return the last report and the state of each replica that runs or loads.

        The state is "running", "loading" or "draining".
        """
        self._drop_silent(time.monotonic())
        return [
            (
                one.report,
                "loading" if one.report.stage else "draining" if self._drain.holds(one.report) else "running",
            )
            for one in self._seen.values()
            if one.healthy
        ]

    def _drop_silent(self, now: float) -> None:
        for replica, one in list(self._seen.items()):
            if one.silent and (not one.report.healthy or now - one.at > ABSENCE_SECONDS):
                del self._seen[replica]
