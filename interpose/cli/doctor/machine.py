"""The machine below a service: system, shared memory, memory, disks, and programs."""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from interpose.cli.doctor.finding import Finding, Status, judged

SHARED_MEMORY = "/dev/shm"
_MIB, _GIB = 1 << 20, 1 << 30
# vLLM refuses to make a message queue where less is free; each worker may make one.
_QUEUE_BYTES = 160 * _MIB
# For Ray's object store; `docker-compose.yml` gives this much.
_GOOD_SHARED_BYTES = 2 * _GIB
# A service with a tiny model uses more than the first; a node with one worker of it uses 1.8 GiB.
_LEAST_MEMORY, _GOOD_MEMORY = 2 * _GIB, 4 * _GIB
# Ray puts nothing on a disk that is fuller.
_FULLEST = 0.95
_LEAST_DISK, _GOOD_DISK = _GIB // 2, 5 * _GIB
_RAY_FOLDER = "/tmp"


def system() -> Finding:
    """Judge the operating system."""
    return judged(
        "system", sys.platform == "linux", f"{platform.system()} {platform.release()}",
        "a service runs on Linux; a client runs anywhere",
    )  # fmt: skip


def shared_memory(folder: str, workers: int) -> Finding:
    """Judge the size of shared memory, for a number of workers on this machine."""
    needed = _QUEUE_BYTES * max(1, workers)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(
            "shared memory", Status.MISSING, f"{folder}: {error.strerror}", f"mount it: mount -t tmpfs tmpfs {folder}"
        )
    found = f"{folder}: {_size(free)} free"
    more = _size(max(needed, _GOOD_SHARED_BYTES))
    remedy = f"make it {more}: docker run --shm-size={_compact(needed)}, `shm_size` in a compose file, or\n"
    remedy += f"mount -o remount,size={_compact(needed)} {folder}"
    if free < needed:
        return Finding("shared memory", Status.MISSING, f"{found}; {workers} workers need {_size(needed)}", remedy)
    return judged(
        "shared memory", free >= _GOOD_SHARED_BYTES, found, f"Ray's object store goes to {_RAY_FOLDER} without it;\n{remedy}",
        Status.WARNING,
    )  # fmt: skip


def memory() -> Finding:
    """Judge the memory that is available to this process."""
    free = _available()
    if free is None:
        return Finding("memory", Status.WARNING, "unknown", "this system does not say how much memory is free")
    found = f"{_size(free)} available"
    remedy = (
        "end other processes, or raise the container's limit: the service itself needs about 4 GiB, beside the model"
    )
    if free < _LEAST_MEMORY:
        return Finding("memory", Status.MISSING, found, remedy)
    return judged("memory", free >= _GOOD_MEMORY, found, remedy, Status.WARNING)


def disks() -> Iterator[Finding]:
    """Judge the disks of Ray's files and of downloaded models."""
    usage = shutil.disk_usage(_RAY_FOLDER)
    full = usage.used / usage.total
    yield judged(
        "disk of Ray", full < _FULLEST and usage.free > _LEAST_DISK, f"{_RAY_FOLDER}: {_size(usage.free)} free, {full:.0%} used",
        f"make room: Ray stores nothing on a disk that is more than {_FULLEST:.0%} full",
    )  # fmt: skip
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    parent = next(one for one in (cache, *cache.parents) if one.exists())
    free = shutil.disk_usage(parent).free
    yield judged(
        "disk of models", free >= _GOOD_DISK, f"{cache}: {_size(free)} free",
        "set HF_HOME to a folder with room; models in local folders need none", Status.WARNING,
    )  # fmt: skip


def tools(kind: str) -> Iterator[Finding]:
    """Judge the programs and libraries that an engine of a kind ("gpu", "cpu" or "") calls."""
    compiler = shutil.which("g++") or shutil.which("c++")
    yield judged(
        "compiler", compiler is not None, compiler or "none",
        "apt-get install g++; without it an engine on CPUs is eager, and one on GPUs cannot compile its programs",
        Status.WARNING,
    )  # fmt: skip
    if kind == "cpu" and sys.platform == "linux":
        library = ctypes.util.find_library("numa")
        yield judged("libnuma", library is not None, library or "not found", "apt-get install libnuma1", Status.WARNING)


def _available() -> int | None:
    """Return the bytes that this process may still use, on the machine and in its container."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
    return free


def _size(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"


def _compact(needed: int) -> str:
    """Return a size that suits `needed`, as mount and Docker take it."""
    return f"{-(-max(needed, _GOOD_SHARED_BYTES) // _GIB)}g"
