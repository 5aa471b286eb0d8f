"""The fault matrix: what each fault did to clients, results and processes, held against `docs/faults.md` or written there.

Tests report what they saw with `report`. `python -m tests.cluster.matrix` runs them and writes the page.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.processes import ENGINE, title
from executor.cluster.shared_memory import mapped_by
from interpose.contract.errors import InterposeError, Unavailable
from tests.e2e.service import RunningService

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
TESTS = ("e2e/test_killed_sandboxes.py", "e2e/test_recovery.py", "cluster/test_faults.py", "cluster/test_partition.py")
_FOLDER = "FAULTS_FOLDER"
# Of what there must be as much after a fault as before, by names of processes.
WORKER = "LazyWorkerActor"
SESSION = "ray::Session"
REPLICA = "ServeReplica:interpose:engine-"
PARTS = (ENGINE, WORKER, "ServeReplica:", "ray::Directory")
# What is smaller may be what Serve and Ray tell each other.
STORED_BYTES = 1 << 20
_BEGIN, _END = "<!-- measured -->", "<!-- /measured -->"

# In the order of the page: everything that reports must be here, and everything here must be on the page.
FAULTS = (
    "the client is killed",
    "the connection breaks in the middle of a trace",
    "SIGKILL of the ingress replica",
    "SIGKILL of the session actor",
    "SIGKILL of a tensor-parallel worker",
    "SIGKILL of the engine core",
    "SIGKILL of the engine replica",
    "a node is cut off",
    "SIGKILL of everything on a node",
    "the object store is full",
    "the disk is full under spilling",
    "Serve deploys the application anew",
    "SIGKILL of a zygote",
    "SIGKILL of a sandboxed process",
)


@dataclass(frozen=True)
class Seen:
    """What a fault did.

    Attributes:
        fault: one of `FAULTS`.
        client: what the client of a trace in flight saw.
        error_seconds: until it saw that; None if it saw nothing.
        recovery_seconds: until a new trace ran; None if nothing had to recover.
        lost: finished results that were gone afterwards.
        leaks: what was left of it, as `leaks` counts it.
    """

    fault: str
    client: str
    error_seconds: float | None
    recovery_seconds: float | None
    lost: int
    leaks: int

    @property
    def row(self) -> str:
        """The line of the page."""
        seconds = (_seconds(self.error_seconds), _seconds(self.recovery_seconds))
        return f"| {' | '.join((self.fault, self.client, *seconds, str(self.lost), str(self.leaks)))} |"


def _seconds(value: float | None) -> str:
    return "–" if value is None else "< 1" if value < 1 else f"{value:.0f}"


def shown(error: InterposeError | None) -> str:
    """What the page says of what a client saw."""
    if error is None:
        return "nothing: its trace went on"
    retryable = ", retryable" if isinstance(error, Unavailable) or error.retry_after > 0 else ""
    return f"`{type(error).__name__}`{retryable}"


def parts(service: RunningService) -> dict[str, int]:
    """How many processes there are of each part."""
    names = []
    for process in service.processes():
        with contextlib.suppress(psutil.Error):
            names.append(title(process))
    return {part: sum(part in name for name in names) for part in (*PARTS, SESSION)}


def shared(service: RunningService) -> set[Path]:
    """The files in shared memory that its processes use."""
    return mapped_by(process.pid for process in service.processes())


@dataclass(frozen=True)
class There:
    """What there is of a service before a fault.

    Attributes:
        parts: how many processes of each part.
        shared: files in shared memory.
    """

    parts: dict[str, int]
    shared: set[Path]

    @classmethod
    def of(cls, service: RunningService) -> There:
        """Look for it."""
        return cls(parts(service), shared(service))


def leaks(service: RunningService, before: There, seconds: float = 120) -> int:
    """How much a fault left behind, when there was that time to clear it away: none once it was seen that there is nothing.

    Printed by name: requests that run, processes beyond those that were there before, session actors that the directory does
    not know, files in shared memory that nobody uses any more, placement groups without a replica, and bytes in the object store
    that are no tenant's.
    """
    ends = time.monotonic() + seconds
    # Two looks at different moments are of no use together: a session that ends leaves its process for a moment.
    while _left(service, before) or _held(service):
        if time.monotonic() > ends:
            left = {**_left(service, before), **_held(service)}
            print(f"left behind: {left}", flush=True)
            return sum(left.values())
        time.sleep(0.5)
    return 0


def _left(service: RunningService, before: There) -> dict[str, int]:
    now, status = parts(service), service.status()
    return _some(
        {f"{model.name}: requests": model.running + model.waiting for model in status.models}
        | {"unknown session actors": now[SESSION] - status.warm_sessions}
        | {part: now[part] - before.parts[part] for part in PARTS}
        | {str(path): int(path.exists()) for path in before.shared - shared(service)}
    )


def _held(service: RunningService) -> dict[str, int]:
    size, groups = service.held()
    stored = sum(tenant.stored_bytes for tenant in service.status().tenants)
    return _some(
        {
            "placement groups": groups - len(service.processes(REPLICA)),
            "bytes in the object store": int(size - stored > STORED_BYTES),
        }
    )


def _some(counts: dict[str, int]) -> dict[str, int]:
    return {what: count for what, count in counts.items() if count > 0}


def report(seen: Seen) -> None:
    """Hold what happened against the page, but for the seconds; or keep it for the page that is being written."""
    assert seen.fault in FAULTS
    if folder := os.environ.get(_FOLDER):
        Path(folder, f"{FAULTS.index(seen.fault)}.json").write_text(json.dumps(asdict(seen)))
        return
    assert stable(seen.row) in {stable(row) for row in rows(PAGE.read_text())}, (
        f"docs/faults.md does not say: {seen.row}"
    )


def rows(page: str) -> list[str]:
    """The lines of the page's table, without its head."""
    table = page.partition(_BEGIN)[2].partition(_END)[0]
    return [line for line in table.splitlines() if line.startswith("| ")][2:]


def stable(row: str) -> tuple[str, ...]:
    """What must be the same each time: all but the seconds."""
    fault, client, _, _, lost, leaks = (cell.strip() for cell in row.strip("|").split("|"))
    return fault, client, lost, leaks


def render(page: str, seen: list[Seen]) -> str:
    """The page with what was seen in its table; rows that were not seen again stay."""
    new = {one.fault: one.row for one in seen}
    old = {stable(row)[0]: row for row in rows(page)}
    head = [
        "| fault | the client of a trace in flight sees | after s | a new trace runs after s | finished results lost | leaks |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    body = [new.get(fault) or old[fault] for fault in FAULTS if fault in new or fault in old]
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    return f"{before}{_BEGIN}\n" + "\n".join([*head, *body]) + f"\n{_END}{after}"


def main() -> None:
    """Run the tests and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(__file__).parents[1] / name) for name in TESTS]
        arguments = sys.argv[1:] or files
        done = subprocess.run([sys.executable, "-m", "pytest", *arguments], env={**os.environ, _FOLDER: folder})
        seen = [Seen(**json.loads(path.read_text())) for path in Path(folder).iterdir()]
    PAGE.write_text(render(PAGE.read_text(), seen))
    bad = [one.row for one in seen if one.lost or one.leaks]
    for row in bad:
        print(f"lost or leaked: {row}")
    raise SystemExit(done.returncode or bool(bad))


if __name__ == "__main__":
    main()
