"""What one process of the service tells operators: its counts, its files and its spans."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from actors.telemetry.counts import Counted, Counts
from actors.telemetry.lines import LineFile, line, log_in_lines
from actors.telemetry.options import Options
from actors.telemetry.record import TraceRecord
from actors.telemetry.spans import Spans

logger = logging.getLogger(__name__)

# A process without a folder for files writes the lines of traces to its log.
TRACE_LOG = logging.getLogger("interpose.traces")


class Telemetry:
    """The counts, files and spans of one process.

    Args:
        part: the process's part of the service: "ingress", "session" or "engine".
        options: what is written, and where.

    Attributes:
        counts: what happened since the last collection.
        spans: makes spans.
    """

    def __init__(self, part: str, options: Options | None = None) -> None:
        self._part = part
        self.counts = Counts()
        self._traces: LineFile | None = None
        self._audit: LineFile | None = None
        self._begin(options or Options())

    def heed(self, options: Options) -> None:
        """Write what these options say from now on; what was counted stays."""
        if options != self._options:
            self.close()
            self._traces = self._audit = None
            self._begin(options)

    def _begin(self, options: Options) -> None:
        self._options = options
        self.spans = Spans(self._part, options)
        if options.json_lines:
            log_in_lines()
            logger.info("a process begins: %s", self._part)
        if options.traces and not options.folder:
            TRACE_LOG.setLevel(logging.INFO)

    def take(self) -> Counted:
        """Return what was counted since the last call."""
        return self.counts.take()

    def trace_ended(self, record: TraceRecord) -> None:
        """Count a trace that has ended, and write its line. Never raises."""
        record.count(self.counts)
        if not self._options.traces:
            return
        text = line(record.fields())
        if not self._options.folder:
            TRACE_LOG.info("%s", text)
            return
        try:
            self._traces = self._traces or self._file("traces")
            self._traces.write(text)
        except OSError:
            logger.exception("the line of a trace could not be written")

    @property
    def audits(self) -> bool:
        """Whether programs are written to the audit log."""
        return self._options.audit

    def audit(self, fields: Mapping[str, Any]) -> None:
        """Write a line of the audit log; does nothing without an audit log.

        Raises:
            OSError: the line could not be written, and what it is about must not run.
        """
        if self._options.audit:
            self._audit = self._audit or self._file("audit")
            self._audit.write(line(fields))

    def close(self) -> None:
        """Send the spans that wait, and close the files."""
        self.spans.close()
        for file in (self._traces, self._audit):
            if file is not None:
                file.close()

    def _file(self, name: str) -> LineFile:
        return LineFile(self._options.folder, name, self._options.file_bytes, self._options.files)
