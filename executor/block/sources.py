"""The text of a trace's code, and what the text says of the code."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from executor.block.garbage import finalizes

# Modules of torch draw their parameters.
_USES_RANDOM = re.compile(
    r"rand|seed|dropout|multinomial|bernoulli|normal|uniform|exponential|shuffle|choice|sample|poisson|geometric|cauchy|gumbel"
    r"|rrelu|\bnn\.(?!functional)",
    re.IGNORECASE,
)

_SHORT = 16 << 10  # characters of a text that is remembered


class Sources:
    """The user's source lines by file and line, and facts about them.

    The facts: whether the code draws random numbers, and whether it runs when objects are dropped.
    """

    def __init__(self) -> None:
        self.lines: dict[str, dict[int, str]] = {}
        self.random = False
        self.final = False

    def add(self, source: str, filename: str, first_line: int) -> None:
        lines = self.lines.setdefault(filename, {})
        lines.update(enumerate(source.splitlines(), first_line))
        self.name(source)
        self.final = self.final or _known(finalizes, source)

    def name(self, text: str) -> None:
        """Note what the user's code is, or what it names in a library."""
        self.random = self.random or _known(_draws, text)


def _draws(text: str) -> bool:
    return _USES_RANDOM.search(text) is not None


def _known(fact: Callable[[str], bool], text: str) -> bool:
    """Return what a text says; many requests have the same short text."""
    return _remembered(fact, text) if len(text) <= _SHORT else fact(text)


@functools.lru_cache(1024)
def _remembered(fact: Callable[[str], bool], text: str) -> bool:
    return fact(text)
