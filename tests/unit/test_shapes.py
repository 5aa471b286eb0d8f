"""A function with a tensor in its signature says the tensor's shape."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Folders whose functions all say shapes. A folder is added here when its functions do.
CLEAN = (
    *("actors", "examples", "serve_app"),
    *(
        f"executor/{name}"
        for name in "block cluster core engine graphs interleave model parallel plugin saves views".split()
    ),
    *(
        f"interpose/{name}"
        for name in "aio capture cli compat contract modules notebook plots program results rpc tracing verbs wire".split()
    ),
)
_TENSOR = re.compile(r"\b(?:torch\.Tensor|Tensor|np\.ndarray|ndarray)\b")
# A shape in brackets, or words that say that the shape does not matter.
_SHAPE = re.compile(r"\[[a-z0-9_ ,.…:+*-]+\]|any shape|same shape|shape of|shaped? (?:as|like)|scalar", re.I)


def tensors(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function takes or returns a tensor itself."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotations = [argument.annotation for argument in arguments] + [function.returns]
    return any(one is not None and _TENSOR.search(ast.unparse(one)) for one in annotations)


def silent(source: str) -> Iterator[str]:
    """Yield the functions that have a tensor in their signature and say no shape."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not tensors(node):
            continue
        if node.name.startswith("__"):
            continue
        signature = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
        comments = "\n".join(re.findall(r"#.*", signature))
        if not _SHAPE.search((ast.get_docstring(node) or "") + comments):
            yield f"{node.name}, line {node.lineno}"


def files() -> list[Path]:
    return [path for name in CLEAN for path in sorted((ROOT / name).rglob("*.py"))]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_with_tensors_say_shapes(path: Path) -> None:
    assert list(silent(path.read_text())) == []


def test_a_silent_function_is_found() -> None:
    assert list(silent("def f(a: torch.Tensor) -> int:\n    '''Return the sum.'''\n")) == ["f, line 1"]
    assert not list(silent("def f(a: torch.Tensor) -> int:\n    '''Return the sum of `a`, [rows, hidden].'''\n"))
    assert not list(silent("def f(\n    a: torch.Tensor,  # [rows]\n) -> int:\n    '''Return the sum.'''\n"))
    assert not list(silent("def f(a: int) -> int:\n    '''Return the sum.'''\n"))
