"""A Python prompt in a terminal of its own, as a person has it in front of them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PASTE = "\x1b[200~", "\x1b[201~"
_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


class Terminal:
    """Runs an interpreter interactively; ``with Terminal(python, home) as prompt``.

    Args:
        python: the interpreter.
        home: a folder of its own: nothing of the user's is read or written, the prompt's history among it.
        pasting: whether the prompt indents what is typed, so that statements have to be pasted.
    """

    def __init__(self, python: Path, home: Path, pasting: bool) -> None:
        self._pasting = pasting
        self._seen = ""
        self._entered = 0
        env = {
            "HOME": str(home),
            "PYTHON_HISTORY": str(home / "history"),
            "TERM": "xterm",
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": str(_ROOT),
        }
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execve(python, [str(python), "-q"], env)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self._read_until(">>> ")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)

    def enter(self, statement: str) -> list[str]:
        """Type a statement; return the lines that it printed with a word that only output has."""
        # A mark that the echo of what is typed does not have.
        self._entered += 1
        end = f"end-{self._entered}."
        before = len(self._seen)
        text = statement.join(_PASTE) if self._pasting else statement
        self._write(f"{text}\n\n")  # a blank line ends a compound statement, and is nothing after another
        self._write(f"print('end-' + '{self._entered}.')\n")
        self._read_until(end, before)
        shown = _CODES.sub("", self._seen[before:]).splitlines()
        return [line for line in shown if line.startswith(("captured ", "refused ", "source "))]

    def _write(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            os.write(self._fd, line.replace("\n", "\r").encode() if not self._pasting else line.encode())

    def _read_until(self, text: str, start: int = 0, seconds: float = 60) -> None:
        limit = time.monotonic() + seconds
        while text not in self._seen[start:]:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"{text!r} did not come:\n{self._seen[start:]}"
            self._seen += os.read(self._fd, 1 << 16).decode(errors="replace")
