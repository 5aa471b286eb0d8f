"""What the processes of a service write for operators, as every process is told it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """What a process writes, and where.

    Attributes:
        folder: the folder of the files on each node; "": no files.
        json_lines: whether the processes' own logs are JSON lines.
        traces: whether each trace that has ended is a line of the log.
        audit: whether each program that runs is a line of the audit log.
        file_bytes, files: the size at which a file is rotated, and how many older files are kept.
        spans: whether the processes make spans.
        endpoint: the URL that spans go to over OTLP/HTTP; "": they go to a file in the folder.
        sample: the part of the traces without a span of the client's that get spans, from 0 to 1.
    """

    folder: str = ""
    json_lines: bool = False
    traces: bool = True
    audit: bool = False
    file_bytes: int = 64 << 20
    files: int = 8
    spans: bool = False
    endpoint: str = ""
    sample: float = 1.0
