"""Which of the others each folder imports: a notebook has the client alone, and only `executor` knows vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY = {
    "interpose": set(),
    "actors": {"interpose", "ray"},
    "executor": {"interpose", "ray", "vllm"},
    "serve_app": {"interpose", "actors", "executor", "ray"},
}
# Commands about a service come with the client, and import the service when they are given.
EXCEPTIONS = {
    "interpose": {
        "interpose/cli/serve.py": {"serve_app", "executor", "vllm"},
        "interpose/cli/keys.py": {"serve_app"},
        "interpose/cli/doctor/ports.py": {"serve_app"},
    }
}
WATCHED = {*MAY, "ray", "vllm", "benchmarks", "examples", "tests", "tools"}


def imported(path: Path) -> set[str]:
    """Return the packages that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} imports from where it is"
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("folder", MAY)
def test_a_folder_imports_what_it_may(folder: str) -> None:
    found = {
        path.relative_to(ROOT).as_posix(): (imported(path) & WATCHED) - {folder} - MAY[folder]
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == EXCEPTIONS.get(folder, {})


@pytest.mark.parametrize(
    "module",
    ["interpose.contract.errors", "interpose.wire.decoder", "executor.core.request", "executor.block.barrier"],
)
def test_a_worker_loads_no_grpc_for_our_code(module: str) -> None:
    # Modules that load neither vLLM nor Ray, which import grpc by themselves.
    code = f"import sys, {module}; print(sorted({{'grpc', 'ray', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
