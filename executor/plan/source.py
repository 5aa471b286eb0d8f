"""The text of a function, from the lines that the notebook sent."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import CodeType


def source_of(code: CodeType, sources: Mapping[str, dict[int, str]]) -> str | None:
    """Return the text of a function of the user's, from its first line on, or None.

    Args:
        code: the function's code.
        sources: the user's source lines by file name.
    """
    known = sources.get(code.co_filename)
    if known is None:
        return None
    lines, number = [], code.co_firstlineno
    while number in known:
        lines.append(known[number])
        number += 1
    return _first_block("\n".join(lines) + "\n")


@functools.lru_cache(512)
def _first_block(text: str) -> str:
    """Return the lines of the definition with which a text begins."""
    lines = text.splitlines(keepends=True)
    try:
        return "".join(inspect.getblock(lines))
    except (SyntaxError, IndentationError):
        return text
