"""What the processes of a service are called."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

ENGINE = "EngineCore"


def title(process: psutil.Process) -> str:
    """Its name and its command line, with `EngineCore` in it if it is vLLM's engine.

    vLLM gives its process that title, but setproctitle 1.3 finds no place for one when the value of the environment's first
    variable was set anew before, and leaves the process as it is. Which is the first, Ray's node decides by chance.

    Raises:
        psutil.Error: it has ended, or may not be looked at.
    """
    said = " ".join((process.name(), *process.cmdline()))
    if ENGINE in said or "multiprocessing.spawn" not in said:
        return said
    # The only others that are spawned so are the parts of Ray's dashboard.
    above = ""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = process.parent()
        above = " ".join(parent.cmdline()) if parent else ""
    return said if "dashboard" in above else f"{ENGINE} {said}"


def joining(processes: Iterable[psutil.Process]) -> dict[str, str]:
    """Return the environment of a process that joins the Ray cluster that has its head among these processes.

    Raises:
        LookupError: none of them is a head.
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
