"""What the engine replicas last said about themselves; one that falls silent is gone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from actors.protocol import ModelState, ReplicaReport

# Replicas report every second; one that is killed says nothing more. A busy machine can hold one up for some seconds.
SILENCE_SECONDS = 20.0
# While it imports and loads, its event loop gets the interpreter only now and then.
LOADING_SILENCE_SECONDS = 30.0


@dataclass
class _Seen:
    report: ReplicaReport
    at: float
    stage_since: float


class ReplicaBoard:
    """The last report of every replica."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def report(self, report: ReplicaReport) -> None:
        """File a replica's report in place of its last one."""
        now = time.monotonic()
        last = self._seen.get(report.replica)
        same = last is not None and last.report.stage == report.stage
        self._seen[report.replica] = _Seen(report, now, last.stage_since if same and last else now)

    def state(self, deployment: str) -> ModelState:
        """Return how a deployment is: RUNNING with one replica that can work, LOADING if one is about to."""
        now = time.monotonic()
        self._drop_silent(now)
        seen = [one for one in self._seen.values() if one.report.deployment == deployment and one.report.healthy]
        running = [one.report for one in seen if not one.report.stage]
        loading = [one for one in seen if one.report.stage]
        return ModelState(
            state="RUNNING" if running else "LOADING" if loading else "UNHEALTHY",
            replicas=len(running),
            running=sum(report.running for report in running),
            waiting=sum(report.waiting for report in running),
            stages=tuple((one.report.stage, now - one.stage_since) for one in loading),
        )

    def _drop_silent(self, now: float) -> None:
        for replica, one in list(self._seen.items()):
            if now - one.at > (LOADING_SILENCE_SECONDS if one.report.stage else SILENCE_SECONDS):
                del self._seen[replica]
