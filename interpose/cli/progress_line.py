"""A progress line on a terminal with the current stage and its time, else plain lines."""

from __future__ import annotations

import re
import time
from typing import TextIO


class ProgressLine:
    """Shows one stage at a time.

    Args:
        out: the stream for the lines.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
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
        elif (name := re.sub(r" \(\d+ s\)", "", stage)) != self._stage:
            self._stage = name
            self._out.write(f"{self.seconds:4.0f} s  {name}\n")
            self._out.flush()

    def end(self) -> None:
        """Clear the line, so that other text can follow."""
        if self._live and self._shown:
            self._write("")
            self._out.write("\r")
            self._out.flush()

    def _write(self, text: str) -> None:
        self._out.write("\r" + text.ljust(len(self._shown)))
        self._out.flush()
        self._shown = text
