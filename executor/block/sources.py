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

# A statement, or what makes a class without one. Without a class, no object of the user's has code that runs by itself.
_CLASSES = re.compile(
    r"\bclass\b|\btype\b|\bexec\b|\beval\b|class__|subclass|types|dataclass|Enum|namedtuple|weakref|finalize"
)

_SHORT = 16 << 10  # characters of a text that is remembered


class Sources:
    """The user's source lines by file and line, and facts about them.

    The facts: whether the code draws random numbers, whether it runs when objects are dropped, and whether it makes classes.
    """

    def __init__(self) -> None:
        self.lines: dict[str, dict[int, str]] = {}
        self.random = False
        self.final = False
        self.classes = False

    def add(self, source: str, filename: str, first_line: int) -> None:
        lines = self.lines.setdefault(filename, {})
        lines.update(enumerate(source.splitlines(), first_line))
        self.name(source)
        self.final = self.final or _known(finalizes, source)
        self.classes = self.classes or _known(_makes_classes, source)

    def name(self, text: str) -> None:
        """Note what the user's code is, or what it names in a library."""
        self.random = self.random or _known(_draws, text)


def _draws(text: str) -> bool:
    return _USES_RANDOM.search(text) is not None


def _makes_classes(text: str) -> bool:
    return _CLASSES.search(text) is not None


def _known(fact: Callable[[str], bool], text: str) -> bool:
    """Return what a text says; many requests have the same short text."""
    return _remembered(fact, text) if len(text) <= _SHORT else fact(text)


@functools.lru_cache(1024)
def _remembered(fact: Callable[[str], bool], text: str) -> bool:
    return fact(text)
