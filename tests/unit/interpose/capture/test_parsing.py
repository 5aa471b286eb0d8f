"""Text is parsed in many threads at once."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor

import pytest

from interpose.capture.parsing import parse_text


def test_threads_get_the_trees_of_their_texts() -> None:
    texts = [f"with a{n}:\n    x = [{', '.join(map(str, range(n + 300)))}]\n" * 20 for n in range(32)]
    expected = [ast.dump(ast.parse(text)) for text in texts]
    with ThreadPoolExecutor(16) as pool:
        assert [ast.dump(tree) for tree in pool.map(parse_text, texts)] == expected


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        parse_text("with :", "a file")
    assert isinstance(parse_text("1 + 1", "a file", "eval"), ast.Expression)
