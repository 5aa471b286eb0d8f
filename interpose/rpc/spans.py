"""The client's span of a trace, if the notebook uses OpenTelemetry.

Nothing is imported for it: a notebook whose process has not loaded `opentelemetry` makes no spans. The context travels in the
call's metadata as W3C's `traceparent`.
"""

from __future__ import annotations

import sys
from typing import Any

from interpose.contract.version import VERSION

_API = "opentelemetry.trace"

Metadata = tuple[tuple[str, str], ...]


class ClientSpan:
    """The span from the submission of a trace to its end, as the client sees it.

    Args:
        trace_id: the id of the trace.
        model: the name of the model, "" for the only one.

    Attributes:
        metadata: the context for the metadata of the call; empty without a span.
    """

    def __init__(self, trace_id: str, model: str) -> None:
        self.metadata: Metadata = ()
        self._span: Any = None
        api = sys.modules.get(_API)
        if api is None:
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes = {"trace": trace_id, "model": model}
        self._span = api.get_tracer("interpose", VERSION).start_span("interpose.trace", attributes=attributes)
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, api.set_span_in_context(self._span))
        self.metadata = tuple(headers.items())

    def end(self, failed: BaseException | None = None) -> None:
        """End the span. Idempotent."""
        span, self._span = self._span, None
        if span is None:
            return
        if failed is not None:
            span.record_exception(failed)
            span.set_status(sys.modules[_API].StatusCode.ERROR)
        span.end()
