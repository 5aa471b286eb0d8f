"""The names of a service's processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

ENGINE = "EngineCore"
SANDBOX = "executor.sandbox.first"  # zygotes, and the processes that they fork


def title(process: psutil.Process) -> str:
    """Return a process's name and command line, with `EngineCore` in it for vLLM's engine.

    vLLM gives its process that title. But setproctitle 1.3 finds no place for a title when the value of the environment's first
    variable was set anew before, and leaves the process as it is. Ray's node decides by chance which variable is the first.

    Raises:
        psutil.Error: the process has ended, or must not be looked at.
    """
    said = " ".join((process.name(), *process.cmdline()))
    if ENGINE in said or "multiprocessing.spawn" not in said:
        return said
    # Only the parts of Ray's dashboard are spawned in the same way.
    above = ""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = process.parent()
        above = " ".join(parent.cmdline()) if parent else ""
    return said if "dashboard" in above else f"{ENGINE} {said}"


def joining(processes: Iterable[psutil.Process]) -> dict[str, str]:
    """Return the environment of a process that joins the Ray cluster of these processes.

    Raises:
        LookupError: none of the processes is a head.
    """
    commands: dict[psutil.Process, list[str]] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            commands[process] = process.cmdline()
    control = next((one for one, command in commands.items() if command and "gcs_server" in command[0]), None)
    addresses = [part for command in commands.values() for part in command if part.startswith("--gcs-address=")]
    if control is None or not addresses:
        raise LookupError("no Ray head runs here")
    environment = {**os.environ, **control.environ(), "RAY_ADDRESS": addresses[0].partition("=")[2]}
    [log] = [part for part in commands[control] if part.startswith("--log_dir=")]
    environment["RAY_TMPDIR"] = str(Path(log.partition("=")[2]).parents[1])
    return environment


def zygotes(processes: Iterable[psutil.Process]) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the zygotes among processes, and what they have forked, the oldest first."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if SANDBOX in title(process):
                found[process.pid] = (process.create_time(), process.ppid(), process)
    ordered = [found[pid] for pid in sorted(found, key=lambda pid: (found[pid][0], pid))]
    return (
        [process for _, parent, process in ordered if parent not in found],
        [process for _, parent, process in ordered if parent in found],
    )
