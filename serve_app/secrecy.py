"""Keeps a process's memory from other processes of the same user.

A block in a worker runs as the user of the service. By default such a process may read the memory and the first environment
of every other process of that user.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_PR_SET_DUMPABLE = 4
# The fields of /proc/PID/stat, counted from the one after the process's name, with the ends of the first environment.
_ENV_START, _ENV_END = 47, 48


def keep_to_itself() -> None:
    """Make this process unreadable for others of its user, root aside, and write no core dumps.

    The kernel then refuses `/proc/PID/mem`, `environ`, `fd` and ptrace. Programs that the process starts are readable again.
    """
    if hasattr(os, "pidfd_open"):  # Linux
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def forget_variables(names: set[str]) -> None:
    """Overwrite the values of variables in the environment that this process was started with.

    Removing a variable from `os.environ` leaves it in `/proc/PID/environ`. Call this after removing them.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    except (OSError, ValueError, IndexError):
        return
    if not 0 < start < end:
        return
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and name.decode(errors="replace") in names and name.decode(errors="replace") not in os.environ:
            ctypes.memset(at + len(name) + 1, ord("x"), len(value))
        at += len(entry) + 1
