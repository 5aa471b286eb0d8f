"""The devices of an engine: the processor, GPUs, their driver, and torch's view of them."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from interpose.cli.doctor.finding import Finding, Status, judged

_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_SECONDS = 60.0
_CUDA = """
import json, torch
seen = torch.cuda.is_available()
reason = ""
if not seen:
    try:
        torch.cuda.init()
    except Exception as error:
        reason = str(error).splitlines()[0]
print(json.dumps([torch.version.cuda, torch.cuda.device_count() if seen else 0, reason]))
"""


def devices(kind: str) -> Iterator[Finding]:
    """Judge the processor and the GPUs.

    Args:
        kind: "gpu" or "cpu" for the engine that is installed, or "".
    """
    yield _processor()
    gpus, reason = _gpus()
    if gpus:
        yield judged(
            "GPU", kind != "cpu", "; ".join(gpus), "the engine for CPUs does not use it: pip install 'interpose[gpu]'",
            Status.WARNING,
        )  # fmt: skip
    elif kind == "gpu":
        remedy = "install NVIDIA's driver, give the container its GPUs (docker run --gpus all),\n"
        yield Finding("GPU", Status.MISSING, reason, f"{remedy}or install the engine for CPUs")
    else:
        yield Finding("GPU", Status.OK, f"{reason}; an engine for CPUs needs none")
    if gpus and kind == "gpu":
        yield _torch_sees(len(gpus))


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{cores} cores, {platform.machine()}"
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    lacking = platform.machine() == "x86_64" and bool(flags) and " avx2" not in flags
    return judged(
        "processor", not lacking, f"{found}, no AVX2" if lacking else found, "vLLM's builds for CPUs need AVX2"
    )


def _gpus() -> tuple[list[str], str]:
    """Return a line for each GPU, or the reason why there is none."""
    if shutil.which("nvidia-smi") is None:
        if Path("/proc/driver/nvidia/version").exists():
            return [], "NVIDIA's driver is loaded, but there is no nvidia-smi"
        return [], "none: there is no nvidia-smi"
    try:
        done = subprocess.run(["nvidia-smi", *_QUERY], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {error}"
    if done.returncode:
        return [], f"nvidia-smi: {(done.stdout + done.stderr).strip().splitlines()[0]}"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    found = [f"{row[0]}, {row[1]}, driver {row[2]}" for row in rows if len(row) == 3]
    return found, "" if found else "nvidia-smi lists none"


def _torch_sees(count: int) -> Finding:
    command = [sys.executable, "-c", _CUDA]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        cuda, seen, reason = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return Finding("CUDA", Status.MISSING, "torch cannot be asked", "see `import torch` above")
    found = f"torch is built for CUDA {cuda} and sees {seen} of {count} GPUs{reason and f': {reason}'}"
    remedy = "the driver is too old for this CUDA: install a newer driver, or a torch for an older CUDA;\n"
    remedy += "or CUDA_VISIBLE_DEVICES hides them"
    return judged("CUDA", seen > 0, found, remedy)
