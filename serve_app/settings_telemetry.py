"""The settings of what operators see: metrics, logs, the audit log, and spans."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from pydantic import Field

from actors.telemetry.options import Options
from serve_app.settings_model import MIB, Part

_OTLP = "opentelemetry.exporter.otlp.proto.http"


class MetricSettings(Part):
    """The metrics that Ray's agents offer to Prometheus on every node."""

    port: int = Field(
        0, ge=0, le=65535, description="port of the metrics on a Ray head of `interpose serve`'s own; 0: any free port"
    )
    engine: bool = Field(True, description="whether vLLM's own metrics are among them")


class LogSettings(Part):
    """Logs of the service's processes, and files of traces and programs."""

    json_lines: bool = Field(False, description="whether the processes' own logs are JSON lines")
    traces: bool = Field(True, description="whether each trace that has ended is a line of the log")
    audit: bool = Field(False, description="whether each program that runs is a line of the audit log; needs `folder`")
    folder: str = Field(
        "",
        max_length=1000,
        description="the folder of the files, on each node; without it traces go to the processes' logs",
    )
    file_bytes: int = Field(64 * MIB, ge=64 * 1024, description="size at which a file is rotated")
    files: int = Field(8, ge=1, le=1000, description="rotated files that are kept of each process")


class SpanSettings(Part):
    """OpenTelemetry's spans of the traces."""

    enabled: bool = Field(False, description="whether the service makes spans")
    endpoint: str = Field(
        "",
        max_length=1000,
        description="the collector's URL for OTLP over HTTP; without it spans go to files in logs.folder",
    )
    sample: float = Field(1.0, ge=0, le=1, description="the part of the traces that get spans, if the client has none")


class _Settings(Protocol):
    @property
    def logs(self) -> LogSettings: ...

    @property
    def spans(self) -> SpanSettings: ...


def check_telemetry(settings: _Settings) -> None:
    """Refuse settings under which something has nowhere to go.

    Raises:
        ValueError: with the setting that is missing.
    """
    logs, spans = settings.logs, settings.spans
    if logs.audit and not logs.folder:
        raise ValueError("logs.audit needs logs.folder: a folder for the audit log's files")
    if not spans.enabled:
        return
    if not spans.endpoint and not logs.folder:
        raise ValueError("spans.enabled needs spans.endpoint, a collector, or logs.folder for files")
    if spans.endpoint and not spans.endpoint.startswith(("http://", "https://")):
        raise ValueError("spans.endpoint is the URL of a collector, e.g. http://collector:4318/v1/traces")
    if spans.endpoint and not _importable(_OTLP):
        raise ValueError("spans.endpoint needs the package opentelemetry-exporter-otlp-proto-http")


def telemetry_of(settings: _Settings) -> Options:
    """Return what every process of the service is told."""
    logs, spans = settings.logs, settings.spans
    return Options(
        folder=logs.folder,
        json_lines=logs.json_lines,
        traces=logs.traces,
        audit=logs.audit,
        file_bytes=logs.file_bytes,
        files=logs.files,
        spans=spans.enabled,
        endpoint=spans.endpoint,
        sample=spans.sample,
    )


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
