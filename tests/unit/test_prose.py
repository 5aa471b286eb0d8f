"""Prose says what it is about: sentences have nouns as subjects, and docstrings begin with one short clause."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Folders and pages whose prose has been rewritten. A rewritten folder is added here.
CLEAN = (
    *("serve_app", "actors", "benchmarks", "examples", "tools", "docs", "README.md", "CONTRIBUTING.md"),
    *(
        f"interpose/{name}"
        for name in "aio capture cli compat contract modules notebook plots program results rpc tracing verbs wire".split()
    ),
    *(
        f"executor/{name}"
        for name in "block cluster core engine graphs interleave model parallel plan plugin sandbox saves views".split()
    ),
    *("interpose/__init__.py", "executor/__init__.py"),
)
# Longest first line of a docstring, without quotes.
MOST = 90

_SUBJECT = (
    r"(?:Whoever|Whatever|Those who|Those that|Those whose|One that|One who|One whose|What it|Who|Somebody|Anybody)"
)
# A banned subject after the beginning of a text, the end of a sentence, or the mark of a list.
BANNED = re.compile(
    rf"(?:^|[.!?:]\s+|^\s*(?:[-*]|\d\.)\s+|\|\s*){_SUBJECT}\b[^?|]*?(?:[.;:|]|$)|\b(?:those who|whoever)\b", re.M
)


def files(suffix: str) -> list[Path]:
    paths = [ROOT / name for name in CLEAN]
    return [
        path for one in paths for path in ([one] if one.is_file() else sorted(one.rglob("*"))) if path.suffix == suffix
    ]


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def comments(source: str) -> Iterator[str]:
    """Yield each block of comments as one text."""
    block: list[str] = []
    line = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != line + 1:
            yield " ".join(block)
            block = []
        block.append(token.string.lstrip("# "))
        line = token.start[0]
    if block:
        yield " ".join(block)


def prose(document: str) -> str:
    """Return a document without its blocks of code, names of code, quoted words, and links."""
    return re.sub(r'`[^`\n]*`|"\w+"|\]\([^)]*\)', "x", re.sub(r"^```.*?^```", "", document, flags=re.M | re.S))


def banned(text: str) -> list[str]:
    return [match.group(0).strip()[:60] for match in BANNED.finditer(text)]


@pytest.mark.parametrize(
    "path", [*files(".py"), *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_subjects_of_docstrings_and_comments_are_nouns(path: Path) -> None:
    source = path.read_text()
    assert [found for text in (*docstrings(source), *comments(source)) for found in banned(text)] == []


@pytest.mark.parametrize("path", files(".py"), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_short_line(path: Path) -> None:
    first = [text.split("\n\n")[0] for text in docstrings(path.read_text())]
    assert [line for line in first if len(line) > MOST or "\n" in line] == []


@pytest.mark.parametrize("path", files(".md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_subjects_in_documents_are_nouns(path: Path) -> None:
    assert banned(prose(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "Whoever made a segment removes it.",
        "The node is lost. Those who wait get an error.",
        "One that is killed says nothing more.",
        "- What it saved is kept.",
        "The error is for whoever started it.",
        "Tokens that those who run would take.",
    ],
)
def test_a_pronoun_as_subject_is_found(text: str) -> None:
    assert banned(text)


@pytest.mark.parametrize(
    "text",
    [
        "The clients that wait get an error.",
        "One rank reports.",
        "What is the worth of a head?",
        "the `those who` of a name",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert not banned(prose(text))
