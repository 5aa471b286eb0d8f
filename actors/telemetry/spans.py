"""OpenTelemetry's spans of a trace on its way through the service.

There are none unless the settings say so.

The context travels as the text of W3C's `traceparent`: in the metadata of the client's call, then in the `TraceRequest`.
"""

from __future__ import annotations

import re
import time
from typing import Any, Protocol

from actors.telemetry.lines import LineFile
from actors.telemetry.options import Options

HEADER = "traceparent"
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

# Spans that wait to be sent, and the seconds between two sendings.
_MOST_WAITING = 4096
_SEND_SECONDS = 1.0


def parent_of(value: object) -> str:
    """Return a `traceparent` that a client has sent, or "" if it is none."""
    return value if isinstance(value, str) and _TRACEPARENT.fullmatch(value) else ""


class Span(Protocol):
    """A part of a trace's way.

    Attributes:
        context: the `traceparent` of what happens within the span; "" if there is none.
    """

    context: str

    def end(self, failed: str = "", **attributes: str | int | float) -> None:
        """End the span.

        Args:
            failed: why what it stands for has failed; "" if it has not.
            attributes: what is known at its end.
        """

    def child(self, name: str, seconds: float, **attributes: str | int | float) -> None:
        """Make a span within this span, which ends now and began some seconds ago."""


class _NoSpan:
    """The span of a process that makes none; the context of the caller goes on."""

    def __init__(self, context: str) -> None:
        self.context = context

    def end(self, failed: str = "", **attributes: str | int | float) -> None:
        pass

    def child(self, name: str, seconds: float, **attributes: str | int | float) -> None:
        pass


class _Recorded:
    """A span of OpenTelemetry's."""

    def __init__(self, tracer: Any, span: Any) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = span
        self._within = set_span_in_context(span)
        self.context = _injected(self._within)

    def end(self, failed: str = "", **attributes: str | int | float) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(attributes)
        if failed:
            self._span.set_status(Status(StatusCode.ERROR, failed[:200]))
        self._span.end()

    def child(self, name: str, seconds: float, **attributes: str | int | float) -> None:
        now = time.time_ns()
        began = now - max(0, int(seconds * 1e9))
        span = self._tracer.start_span(name, context=self._within, start_time=began, attributes=attributes)
        span.end(end_time=now)


class Spans:
    """Makes the spans of one process.

    Args:
        part: the process's part of the service, which is a span's service name after "interpose-".
        options: whether there are spans, and where they go.
    """

    def __init__(self, part: str, options: Options) -> None:
        self._provider = _provider(part, options) if options.spans else None
        self._tracer = self._provider.get_tracer("interpose") if self._provider is not None else None

    @property
    def on(self) -> bool:
        """Whether spans are made."""
        return self._tracer is not None

    def begin(self, name: str, parent: str = "", **attributes: str | int | float) -> Span:
        """Begin a span.

        Args:
            parent: the `traceparent` of the caller, "" for none.
            attributes: what is known at its beginning.
        """
        if self._tracer is None:
            return _NoSpan(parent)
        return _Recorded(self._tracer, self._tracer.start_span(name, _extracted(parent), attributes=attributes))

    def close(self) -> None:
        """Send the spans that wait."""
        if self._provider is not None:
            self._provider.shutdown()


def _injected(context: Any) -> str:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, context)
    return headers.get(HEADER, "")


def _extracted(parent: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # An empty context: Ray may have spans of its own.
    return TraceContextTextMapPropagator().extract({HEADER: parent} if parent else {}, Context())


def _provider(part: str, options: Options) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(options.sample)),
        resource=Resource.create({"service.name": f"interpose-{part}"}),
        shutdown_on_exit=True,
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            _exporter(options),
            max_queue_size=_MOST_WAITING,
            schedule_delay_millis=_SEND_SECONDS * 1000,
            max_export_batch_size=512,
        )
    )
    return provider


def _exporter(options: Options) -> Any:
    if options.endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=options.endpoint)
    return _file_exporter(LineFile(options.folder, "spans", options.file_bytes, options.files))


def _file_exporter(file: LineFile) -> Any:
    """Return an exporter that writes spans to a file, one line of JSON for each."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class FileExporter(SpanExporter):
        def export(self, spans: Any) -> Any:
            try:
                for span in spans:
                    file.write(span.to_json(indent=None))
            except OSError:
                return SpanExportResult.FAILURE
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            file.close()

    return FileExporter()
