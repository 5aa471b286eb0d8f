"""One word, one meaning: the glossary has each noun once, and names do not contain words that are not used."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
_SECTION = "## Words that are not used"

# Folders whose names have been looked through. A folder is added here when its names pass.
CLEAN = (
    *("actors", "benchmarks", "examples", "serve_app", "tools"),
    *(
        f"executor/{name}"
        for name in "block cluster core engine graphs interleave model parallel plan plugin sandbox saves views".split()
    ),
    *(
        f"interpose/{name}"
        for name in "aio capture cli compat contract modules notebook plots program results rpc tracing verbs wire".split()
    ),
)
# The folders and names in which a word has its one meaning, as the glossary says.
KEPT = {
    "carried": ("executor/plan/",),
    "whole": ("executor/model/", "executor/plan/", "executor/views/pattern.py"),
    "windows": ("interpose/cli/demo_model.py",),  # of the attention layers of a model
}


def rows(section: str) -> list[str]:
    """Return the first cells of a section's tables, without their headers."""
    cells = re.findall(r"^\| ([^|]+?) \|", section, re.M)
    return [cell for cell in cells if cell not in ("noun", "word", "---")]


def nouns() -> list[str]:
    return rows(GLOSSARY.read_text().split(_SECTION)[0])


def unused() -> set[str]:
    return set(rows(GLOSSARY.read_text().split(_SECTION)[1]))


def words(name: str) -> set[str]:
    """Return the parts of a name, in lower case: of `_LateDelivery` these are "late" and "delivery"."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def given_names(source: str) -> Iterator[tuple[str, int]]:
    """Yield the names that a file defines, with their lines; methods and functions may be verbs."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not words(node.name) & {"place"}:
                yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def found(path: str, source: str) -> list[str]:
    """Return the names of a file that contain a word that is not used."""
    banned = {word for word in unused() if not path.startswith(KEPT.get(word, ()))}
    named = [*given_names(source), (Path(path).stem, 0)]
    return [f"{name}, line {line}" for name, line in named if words(name) & banned and "in_place" not in name]


def files() -> list[Path]:
    generated = ROOT / "interpose" / "v1"
    paths = [path for name in CLEAN for path in sorted((ROOT / name).rglob("*.py"))]
    return [path for path in paths if generated not in path.parents]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_names_contain_no_word_that_is_not_used(path: Path) -> None:
    assert found(str(path.relative_to(ROOT)), path.read_text()) == []


def test_the_glossary_has_each_noun_once() -> None:
    assert len(nouns()) > 40
    assert [noun for noun, count in Counter(nouns()).items() if count > 1] == []


def test_no_noun_of_the_glossary_is_a_word_that_is_not_used() -> None:
    assert unused() and not {noun for noun in nouns() if noun in unused()}


@pytest.mark.parametrize(
    "source",
    [
        "class Strand: ...",
        "class _LateDelivery: ...",
        "def companions(trace): ...",
        "def run(together): ...",
        "self.places = []",
        "for whole in values: ...",
        "elsewhere: int = 0",
    ],
)
def test_a_word_that_is_not_used_is_found(source: str) -> None:
    assert found("executor/block/x.py", source)


@pytest.mark.parametrize(
    "source", ["def place(session): ...", "self.in_place = True", "x = request.together", "class Windowsill: ..."]
)
def test_other_names_pass(source: str) -> None:
    assert not found("executor/block/x.py", source)


def test_a_word_has_its_one_meaning_where_it_is_kept() -> None:
    assert not found("executor/model/layouts.py", "whole = 1") and found("executor/engine/x.py", "whole = 1")
