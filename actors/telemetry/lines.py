"""JSON lines: files that are rotated, and the format of the processes' own logs."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

# Characters of one text in a line. Names come from clients.
LONGEST = 2000

_OURS = ("actors", "executor", "interpose", "serve_app")


def line(fields: Mapping[str, Any]) -> str:
    """Return a JSON object on one line, with its time first."""
    return json.dumps({"time": stamp(time.time()), **fields}, separators=(",", ":"), default=str)


def stamp(seconds: float) -> str:
    """Return a time in seconds since the Unix epoch as UTC text, e.g. 2026-01-31T12:00:00.123Z."""
    milliseconds = int(seconds * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(milliseconds // 1000))}.{milliseconds % 1000:03d}Z"


class LineFile(RotatingFileHandler):
    """A file of JSON lines of one process, rotated by its size.

    Only the user of the service can read it. The file's name has the host and the process, because no two processes may
    rotate one file.

    Args:
        folder: the folder, which is made if it is missing.
        name: the first part of the file's name.
        file_bytes, files: the size at which the file is rotated, and how many older files are kept.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: str, name: str, file_bytes: int, files: int) -> None:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        path = Path(folder) / f"{name}-{socket.gethostname()}-{os.getpid()}.jsonl"
        super().__init__(path, maxBytes=file_bytes, backupCount=files, encoding="utf-8", delay=True)

    def write(self, text: str) -> None:
        """Append a line.

        Raises:
            OSError: the line could not be written.
        """
        self.handle(logging.makeLogRecord({"msg": "%s", "args": (text,)}))

    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(open(self.baseFilename, "ab", opener=_private), encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:
        """Raise the error that writing has raised; the class above prints it."""
        raise sys.exc_info()[1] or OSError("a line could not be written")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class JsonFormatter(logging.Formatter):
    """Formats a record of a log as a JSON line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = {
            "time": stamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage()[:LONGEST],
            "process": record.process,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, separators=(",", ":"))


def log_in_lines() -> None:
    """Make this process write its log as JSON lines.

    They go to standard error, which Ray keeps in the process's log file.
    """
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.__stderr__)  # Serve puts another stream into the place of `sys.stderr`
    handler.setFormatter(JsonFormatter())
    root.handlers[:] = [handler]
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    for name in ("ray", "ray.serve", "vllm"):  # their own handlers would write the same in another form
        logger = logging.getLogger(name)
        for other in list(logger.handlers):
            if isinstance(other, logging.StreamHandler) and not isinstance(other, logging.FileHandler):
                other.setFormatter(JsonFormatter())
