"""What the project leans on in vLLM is written down (`executor.plugin.contract`), and the installed vLLM has it."""

from __future__ import annotations

import ast
import functools
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tomllib

from executor.plugin import contract
from executor.plugin.contract_check import Class, Package, check, installed, main
from executor.plugin.contract_entries import Attributes, Call, Entry, Exactly, Group, Method, Variable

ROOT = Path(__file__).parents[2]
PRODUCT = ("executor", "interpose", "serve_app", "actors")
ENTRIES = [entry for group in contract.GROUPS for entry in group.entries]


@functools.cache
def vllm() -> Package:
    return Package(installed())


def path_of(entry: Entry) -> str:
    """Return the name that an entry is about."""
    return (
        entry.name
        if isinstance(entry, Variable)
        else entry.cls
        if isinstance(entry, Attributes | Exactly)
        else entry.path
    )


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Return the product's files, parsed."""
    files = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in files]


def imports(tree: ast.Module) -> dict[str, str]:
    """Return the dotted paths that a file imports, wherever in it, by the names that it has for them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found


@dataclass
class Ours:
    """A class of the project, and what it derives from.

    Attributes:
        bases: classes of the project, this one first.
        theirs: classes of vLLM that it derives from, also by way of a base in the project.
        typed: those that a mixin has for the type checker alone.
    """

    node: ast.ClassDef
    names: dict[str, str]
    bases: list[Ours] = field(default_factory=list)
    theirs: list[Class] = field(default_factory=list)
    typed: list[Class] = field(default_factory=list)

    def methods(self) -> dict[str, ast.AST]:
        """Return what it defines, its bases in the project included."""
        defined = [part for one in self.bases for part in one.node.body]
        return {part.name: part for part in defined if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}

    def used(self) -> set[str]:
        """Return the names of what its methods take from `self` and from `super()`, and set there."""
        nodes = (node for one in self.bases for node in ast.walk(one.node) if isinstance(node, ast.Attribute))
        return {node.attr for node in nodes if ast.unparse(node.value) in ("self", "super()")}


@functools.cache
def derived() -> dict[str, Ours]:
    """Return the project's classes that derive from vLLM's, by name."""
    classes = {
        node.name: Ours(node, imports(tree))
        for _, tree in trees()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }

    def fill(one: Ours) -> None:
        if one.bases:
            return
        one.bases.append(one)
        for base in map(ast.unparse, one.node.bases):
            path = one.names.get(base, base)
            if path.startswith("vllm."):
                found = vllm().find_class(path)
                assert found is not None, path
                (one.typed if base == "_Base" else one.theirs).append(found)
            elif path.rpartition(".")[2] in classes:
                above = classes[path.rpartition(".")[2]]
                fill(above)
                one.bases += above.bases
                one.theirs += above.theirs
                one.typed += above.typed

    for one in classes.values():
        fill(one)
    return {name: one for name, one in classes.items() if one.theirs or one.typed}


@functools.cache
def written(base: Class) -> set[str]:
    """Return the members of a class of vLLM that the contract has, by the class itself or one that it derives from."""
    line = {one.path for one in vllm().line_of(base)}
    found = set()
    for entry in ENTRIES:
        if isinstance(entry, Attributes | Exactly):
            path, names = entry.cls, set(entry.names)
        elif isinstance(entry, Method | Call):
            path, _, name = entry.path.rpartition(".")
            names = {name}
        else:
            continue
        cls = vllm().find_class(path)
        found |= names if cls is not None and cls.path in line else set()
    return found


def not_written(names: Callable[[Ours], Iterable[str]]) -> set[str]:
    """Return which of some names are vLLM's and not in the contract, over the classes that derive from vLLM's."""
    return {
        f"{one.node.name}.{name} of {base.path}"
        for one in derived().values()
        for base in one.theirs or one.typed
        for name in (vllm().members_of(base) & set(names(one))) - written(base)
        if not name.startswith("__")
    }


def test_the_installed_vllm_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    status = main([], contract.GROUPS, contract.VERSION)
    said = capsys.readouterr().out
    assert (status, said[:12]) == (0, "0 broken of "), said


def test_the_version_is_the_one_that_is_installed_with_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {one.partition("==")[2] for name in ("cpu", "gpu") for one in extras[name] if one.startswith("vllm")}
    assert pinned == {contract.VERSION}


def test_every_import_from_vllm_is_written_down() -> None:
    known = {path_of(entry) for entry in ENTRIES}
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees()
        for name in imports(tree).values()
        if name.partition(".")[0] == "vllm" and name not in known
    }
    assert missing == set()


def test_every_variable_of_vllm_is_written_down() -> None:
    known = {entry.name for entry in ENTRIES if isinstance(entry, Variable)}
    found = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            name = (
                node.value if isinstance(node, ast.Constant) else node.attr if isinstance(node, ast.Attribute) else ""
            )
            if isinstance(name, str) and re.fullmatch("VLLM_[A-Z0-9_]+", name):
                found.add(name)
    assert found == known


def test_there_are_classes_that_derive_from_vllms() -> None:
    assert {"InterposeCPUWorker", "GPURunnerV2", "InterposeAsyncScheduler", "LazyRayExecutor"} <= derived().keys()


def test_every_overridden_method_is_written_down() -> None:
    assert not_written(Ours.methods) == set()


def test_every_attribute_of_self_that_is_vllms_is_written_down() -> None:
    assert not_written(Ours.used) == set()


def test_every_reason_is_one_clause_and_every_folder_is_there() -> None:
    assert [
        path_of(entry) for entry in ENTRIES if not entry.why or entry.why.endswith(".") or len(entry.why) > 110
    ] == []
    assert [group.folder for group in contract.GROUPS if not (ROOT / group.folder).is_dir()] == []


def test_nothing_is_written_down_twice() -> None:
    seen = [
        (type(entry), path_of(entry), getattr(entry, "contains", ()), getattr(entry, "names", ())) for entry in ENTRIES
    ]
    assert [one for one in seen if seen.count(one) > 1] == []


_FILES = (
    "v1/core/sched/scheduler.py",
    "v1/core/sched/request_queue.py",
    "v1/core/block_pool.py",
    "v1/request.py",
    "v1/outputs.py",
)
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("v1/request.py", "nothing", "nothing", []),
        (
            "v1/core/sched/scheduler.py",
            "def _enqueue_waiting_request(",
            "def _enqueue(",
            [f"{_SCHEDULER}._enqueue_waiting_request: there is no such name"],
        ),
        (
            "v1/core/sched/scheduler.py",
            "def schedule(self, throttle_prefills: bool = False)",
            "def schedule(self)",
            [f"{_SCHEDULER}.schedule: takes (), no longer (throttle_prefills=False)"],
        ),
        (
            "v1/core/sched/scheduler.py",
            "preempted_req = self.running.pop()",
            "preempted_req = self.running.pop(0)",
            [f"{_SCHEDULER}.schedule: its source has no `preempted_req = self.running.pop()` in this order"],
        ),
        (
            "v1/core/sched/request_queue.py",
            "def prepend_requests(self, requests",
            "def prepend_requests(self, requests, first",
            ["vllm.v1.core.sched.request_queue.RequestQueue.prepend_requests: also needs first"],
        ),
        (
            "v1/core/sched/request_queue.py",
            "def prepend_requests(self, requests",
            "def prepend_requests(self, first",
            ["vllm.v1.core.sched.request_queue.RequestQueue.prepend_requests: argument 1 is first, no longer requests"],
        ),
        (
            "v1/request.py",
            "self.num_output_placeholders",
            "self.num_placeholders",
            ["vllm.v1.request.Request.num_output_placeholders: there is no such attribute"],
        ),
        (
            "v1/outputs.py",
            "    @abstractmethod\n    def get_output(",
            "    @abstractmethod\n    def close(self): ...\n\n    @abstractmethod\n    def get_output(",
            ["vllm.v1.outputs.AsyncModelRunnerOutput.close: new among its abstract methods"],
        ),
    ],
)
def test_a_copy_with_one_change_is_told_by_that_change(
    tmp_path: Path, file: str, old: str, new: str, said: list[str]
) -> None:
    for one in _FILES:
        copy = tmp_path / "vllm" / one
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(installed() / one, copy)
    changed = tmp_path / "vllm" / file
    text = changed.read_text()
    assert old in text or old == "nothing"
    changed.write_text(text.replace(old, new))
    modules = tuple("vllm." + one.removesuffix(".py").replace("/", ".") + "." for one in _FILES)
    entries = tuple(entry for entry in ENTRIES if path_of(entry).startswith(modules))
    assert len(entries) > 20
    broken = check(Package(tmp_path / "vllm"), [Group("all", "executor", entries)])
    assert [one.what for one in broken] == said
    assert all(one.why and one.where == "executor, all" for one in broken)


def test_another_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)], contract.GROUPS, contract.VERSION) == 2
    assert "no folder of vLLM's package" in capsys.readouterr().err
