"""Classes without methods, which no code object leads to: they are looked for in every text that linecache knows."""

from __future__ import annotations

import linecache

import pytest

from interpose.capture import class_source
from interpose.capture.source import _parsed


@pytest.mark.parametrize(
    "statement",
    ["class Sought:", "class \\\n  Sought :", "class\tSought():", "class \N{LATIN SMALL LIGATURE FI}xed:"],
)
def test_a_class_is_found_and_only_texts_that_name_it_are_parsed(
    statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, other = f"<cell {statement}>", f"<other {statement}>"
    text = f"{statement}\n    rank = 2\n"
    beside = "class Other:\n    rank = 2\nSought = fixed = Other  # the class Soughtest\n"
    for name, lines in ((cell, text), (other, beside)):
        monkeypatch.setitem(linecache.cache, name, (len(lines), None, lines.splitlines(True), name))
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(text, cell, "exec"), names)
    cls = names.get("Sought") or names["fixed"]
    assert isinstance(cls, type)
    source = class_source(cls)
    assert source is not None and (source.filename, source.source) == (cell, text)
    assert _parsed.get(None, cell) is not None and _parsed.get(None, other) is None
