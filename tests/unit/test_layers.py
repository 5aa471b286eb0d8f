"""Imports have no cycles: imports for types alone count, and imports inside functions do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = ("executor", "interpose", "serve_app", "actors")

Graph = dict[str, set[str]]


def modules(roots: tuple[str, ...]) -> dict[str, Path]:
    """Return the files of some packages, by the names of their modules."""
    found = {}
    for root in roots:
        for path in (ROOT / root).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_graph(roots: tuple[str, ...]) -> Graph:
    """Return which of their modules each module of some packages imports."""
    files = modules(roots)
    graph: Graph = {}
    for name, path in files.items():
        imported = graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.module and not node.level, f"{path} imports from where it is"
                parts = (f"{node.module}.{alias.name}" for alias in node.names)
                imported.update(part if part in files else node.module for part in parts)
        imported &= files.keys() - {name}
    return graph


def reached(graph: Graph, start: str) -> set[str]:
    """Return the modules that a module needs, over any detour."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def cycles(graph: Graph) -> list[set[str]]:
    """Return the sets of modules of which each needs every other."""
    needs = {name: reached(graph, name) for name in graph}
    circles = {
        frozenset(other for other in needs[name] if name in needs[other]) for name in graph if name in needs[name]
    }
    return [set(one) for one in circles]


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"f"}, "f": {"e"}, "g": set()}
    assert sorted(map(sorted, cycles(graph))) == [["a", "b", "c"], ["e", "f"]]


@pytest.mark.parametrize("root", ROOTS)
def test_no_module_needs_itself(root: str) -> None:
    found = set().union(*cycles(import_graph(ROOTS)))
    assert not {name for name in found if name.partition(".")[0] == root}
