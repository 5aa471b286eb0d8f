"""The text of a trace's code, and what the text says of the code."""

from __future__ import annotations

import re

from executor.block.garbage import finalizes

# Modules of torch draw their parameters.
_USES_RANDOM = re.compile(
    r"rand|seed|dropout|multinomial|bernoulli|normal|uniform|exponential|shuffle|choice|sample|poisson|geometric|cauchy|gumbel"
    r"|rrelu|\bnn\.(?!functional)",
    re.IGNORECASE,
)


class Sources:
    """The user's source lines by file name and line number, and whether they draw random numbers, or run when objects go."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[int, str]] = {}
        self.random = False
        self.final = False

    def add(self, source: str, filename: str, first_line: int) -> None:
        lines = self.lines.setdefault(filename, {})
        lines.update(enumerate(source.splitlines(), first_line))
        self.name(source)
        self.final = self.final or finalizes(source)

    def name(self, text: str) -> None:
        """Note what the user's code is, or what it names in a library."""
        self.random = self.random or _USES_RANDOM.search(text) is not None
