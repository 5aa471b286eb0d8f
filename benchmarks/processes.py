"""What the processes of a service are called."""

from __future__ import annotations

import contextlib

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
