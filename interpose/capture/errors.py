"""The error of capturing: the obstacle, its line, and what to write instead."""

from __future__ import annotations


class CaptureError(Exception):
    """A block that cannot be captured.

    `filename` and `line` (from 1) say where, `text` is that line of the source (empty where there is none), `hint` what
    to write instead (empty where nothing helps).
    """

    def __init__(self, message: str, *, filename: str, line: int, text: str = "", hint: str = ""):
        super().__init__(message)
        self.message = message
        self.filename = filename
        self.line = line
        self.text = text
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message, f'  File "{self.filename}", line {self.line}']
        if self.text:
            lines.append(f"    {self.text.strip()}")
        if self.hint:
            lines.append(self.hint)
        return "\n".join(lines)
