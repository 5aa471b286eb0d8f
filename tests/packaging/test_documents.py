"""What README.md and docs/ show can be typed: commands exist, Python compiles, and the files they name are there."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
PACKAGES = ("actors", "executor", "interpose", "serve_app")
DOTTED = re.compile(rf"({'|'.join(PACKAGES)})(\.\w+)+")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def fences(language: str) -> list[str]:
    return [body for path in DOCUMENTS for kind, body in FENCE.findall(path.read_text()) if kind == language]


def inline() -> set[str]:
    return {code for path in DOCUMENTS for code in INLINE.findall(FENCE.sub("", path.read_text()))}


def commands() -> list[str]:
    shown = [line.split(" #")[0].strip() for body in fences("sh") for line in body.splitlines()]
    shown += [code for code in inline() if code.startswith(("make ", "interpose ", "pip install "))]
    return sorted({command for command in shown if command})


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    names = {shlex.split(command)[1] for command in commands() if command.startswith("interpose ")}
    texts = {name: interpose(name, "--help") for name in names}
    if "keys" in texts:
        texts["keys"] += "".join(interpose("keys", command, "--help") for command in ("new", "hash", "list", "revoke"))
    return texts


def interpose(*arguments: str) -> str:
    program = Path(sys.executable).with_name("interpose")
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


def test_documents_show_the_two_commands() -> None:
    assert {"make demo", "make test"} <= set(commands())


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_knows_it(command: str) -> None:
    result = subprocess.run(
        ["make", "-n", *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("interpose ")])
def test_interpose_knows_it(command: str, help_texts: dict[str, str]) -> None:
    _, name, *arguments = shlex.split(command)
    engine_options = {"--dtype", "--max-model-len"}  # handed on to vLLM
    for option in [a.split("=")[0] for a in arguments if a.startswith("--")]:
        assert option in help_texts[name] or option in engine_options, command


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("pip install ")])
def test_extras_exist(command: str) -> None:
    declared = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(re.findall(r"\[(\w+)\]", command)) <= set(declared)


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("python examples/")])
def test_examples_know_it(command: str) -> None:
    """What they do with it is tests/e2e/test_examples.py's, by the name of each."""
    _, script, *arguments = shlex.split(command)
    result = subprocess.run([sys.executable, ROOT / script, "--help"], check=True, capture_output=True, text=True)
    assert all(option in result.stdout for option in arguments if option.startswith("--"))
    tests = (ROOT / "tests" / "e2e" / "test_examples.py").read_text()
    assert f"def test_{Path(script).stem}(" in tests


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    known = ("make ", "interpose ", "pip install ", "python examples/", ". .venv/bin/activate")
    known += ("kubectl ", "mapfile ", "echo ", "docker ")  # test_deployment.py, tests/k8s
    known += ("python -m benchmarks",)  # test_benchmarks.py
    known += ("python -m tests.fidelity ",)  # tests/engine/fidelity/test_checkpoint.py, test_real_weights.py
    known += ("python -m tests.fidelity.on_gpus ",)  # tests/engine/fidelity/test_on_gpus.py
    known += ("python -m executor.plugin.contract",)  # tests/unit/test_vllm_contract.py
    assert [command for command in commands() if not command.startswith(known)] == []


@pytest.mark.parametrize("source", fences("python"))
def test_python_compiles(source: str) -> None:
    ast.parse(source)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    missing = [
        link
        for link in LINK.findall(document.read_text())
        if not any(path.exists() for path in (document.parent / link, (document.parent / link).with_suffix(".ipynb")))
    ]
    assert missing == []


@pytest.mark.parametrize("name", sorted(code for code in inline() if DOTTED.fullmatch(code)))
def test_names_exist(name: str) -> None:
    """`package.module.Class.method`: the module is there, and its file defines the rest. Nothing is imported."""
    parts = name.split(".")
    while parts and not (file := ROOT.joinpath(*parts).with_suffix(".py")).is_file():
        parts.pop()
    if not parts:
        parts = name.split(".")[:2]
        while len(parts) > 1 and not ROOT.joinpath(*parts, "__init__.py").is_file():
            parts.pop()
        file = ROOT.joinpath(*parts, "__init__.py")
    assert file.is_file(), name
    text = file.read_text()
    undefined = [part for part in name.split(".")[len(parts) :] if not re.search(rf"\b{part}\b", text)]
    assert undefined == []


@pytest.mark.parametrize("name", sorted(code for code in inline() if re.fullmatch(r"[\w./-]+/", code)))
def test_folders_exist(name: str) -> None:
    """A folder that a command makes is not in a fresh clone; git ignores it."""
    assert (ROOT / name).is_dir() or name in (ROOT / ".gitignore").read_text().splitlines()


def test_the_server_packages_are_importable_from_an_installed_checkout() -> None:
    assert all(find_spec(package) is not None for package in PACKAGES)
