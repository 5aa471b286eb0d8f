"""A progress line on a terminal with the current stage and its time, else plain lines.

A log has a line for each stage, and a further line for a stage that takes long: an engine compiles for minutes.
"""

from __future__ import annotations

import re
import shutil
import time
from typing import TextIO

_LONG_SECONDS = 30.0


class ProgressLine:
    """Shows one stage at a time.

    Args:
        out: the stream for the lines.
        long_seconds: after which a log says that a stage still goes on.
    """

    def __init__(self, out: TextIO, long_seconds: float = _LONG_SECONDS) -> None:
        self._out = out
        self._long_seconds = long_seconds
        self._said = 0.0  # when the last line of a log was written
        self._live = out.isatty()
        self._begun = time.monotonic()
        self._stage = ""
        self._shown = ""

    @property
    def seconds(self) -> float:
        """The seconds since the beginning."""
        return time.monotonic() - self._begun

    def __call__(self, stage: str) -> None:
        """Show a stage.

        Seconds in parentheses, one number for each model, are not part of the stage's name.
        """
        if self._live:
            self._write(f"{self.seconds:4.0f} s  {stage}")
            return
        name = re.sub(r" \(\d+ s\)", "", stage)
        if name == self._stage and self.seconds - self._said < self._long_seconds:
            return
        still = "still " if name == self._stage else ""
        self._stage, self._said = name, self.seconds
        self._out.write(f"{self.seconds:4.0f} s  {still}{name}\n")
        self._out.flush()

    def end(self) -> None:
        """Clear the line, so that other text can follow."""
        if self._live and self._shown:
            self._write("")
            self._out.write("\r")
            self._out.flush()

    def _write(self, text: str) -> None:
        # A line that wraps could not be written over.
        width = shutil.get_terminal_size().columns - 1
        text = text if len(text) <= width else f"{text[: width - 1]}…"
        self._out.write("\r" + text.ljust(len(self._shown)))
        self._out.flush()
        self._shown = text
