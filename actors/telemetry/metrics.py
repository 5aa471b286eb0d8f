"""All metrics of the service by name, with their labels.

`docs/operating.md` has the table of them.

Ray's metrics endpoint puts `ray_` before each name, and `_total` behind a counter's. The labels have few values: tenants and
models are those of the settings, and the other labels are words of this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: the name without Ray's prefix and suffix.
        kind: how the metric behaves.
        labels: the names of its labels.
        text: what it says, with the unit.
        bounds: of a histogram, the upper bounds of its buckets.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str
    bounds: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """The name at Ray's metrics endpoint.

        A histogram's name there ends in `_bucket`, `_sum` or `_count`.
        """
        return f"ray_{self.name}" + ("_total" if self.kind is Kind.COUNTER else "")


_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_OF_TENANT = ("tenant", "model")


def _counter(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"interpose_{name}", Kind.COUNTER, labels, text)


def _gauge(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"interpose_{name}", Kind.GAUGE, labels, text)


def _histogram(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(f"interpose_{name}", Kind.HISTOGRAM, labels, text, _SECONDS)


# Traces, counted when they end
TRACES = _counter(
    "traces",
    (*_OF_TENANT, "method", "outcome"),
    "traces that have ended; method: `trace`, `job`, `scan` or `explain`; outcome: `done`, `failed` or `cancelled`",
)
INVOKES = _counter("invokes", _OF_TENANT, "invokes of these traces")
TOKENS = _counter("tokens", (*_OF_TENANT, "kind"), "tokens of these traces; kind: `prompt` or `generated`")
QUEUE_SECONDS = _histogram(
    "queue_seconds",
    _OF_TENANT,
    "seconds from the submission of a trace to the beginning of its first block, or its first event",
)
RUNNING_SECONDS = _histogram("running_seconds", _OF_TENANT, "seconds from there to the end of the trace")
STEPS = _counter(
    "steps", (*_OF_TENANT, "tier"), "steps of blocks; tier: `graph`, `plan`, `block` or `idle` ([tiers](tiers.md))"
)
BLOCK_SECONDS = _counter("block_seconds", _OF_TENANT, "seconds for which forward passes waited for the code of blocks")
SAVED_BYTES = _counter("saved_bytes", _OF_TENANT, "bytes of the large values that traces saved")

# What tenants hold now
RUNNING = _gauge("traces_running", ("tenant",), "traces that wait or run now")
SESSIONS = _gauge("sessions", ("tenant",), "open sessions")
STORED_BYTES = _gauge("stored_bytes", ("tenant",), "bytes that the sessions hold: uploads, results, event logs")
ACTORS = _gauge("session_actors", (), "processes that hold sessions")

# Calls
REFUSALS = _counter(
    "refusals",
    ("tenant", "method", "code", "limit"),
    "calls that were refused; code: an error code; limit: the setting that was reached, if the refusal names one; "
    "tenant: empty for a caller without a known key",
)

# Engines
REPLICAS = _gauge("replicas", ("model", "state"), "replicas; state: `running`, `loading` or `draining`")
ENGINE_INVOKES = _gauge(
    "engine_invokes", ("model", "state"), "invokes on the replicas now; state: `running` or `waiting`"
)
SANDBOX_STARTS = _counter("sandbox_starts", ("model",), "sandboxed processes that were given to a trace")
SANDBOX_KILLS = _counter(
    "sandbox_kills", ("model",), "sandboxed processes that were ended because a turn did not end well"
)
GRAPH_CAPTURES = _counter(
    "graph_captures", ("model", "result"), "captures of CUDA graphs; result: `captured`, `failed` or `mismatched`"
)
GRAPH_STEPS = _counter(
    "graph_steps",
    ("model", "how"),
    "steps with blocks by how the worker ran them; how: `graph` or `eager`",
)
GRAPH_EVICTIONS = _counter("graph_evictions", ("model",), "graphs that gave way to others in the cache")
GRAPHS = _gauge("graphs", ("model",), "graphs in the caches of the workers")
GRAPH_BYTES = _gauge("graph_bytes", ("model",), "bytes of these graphs")

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
BY_NAME = {metric.name: metric for metric in METRICS}


def table() -> str:
    """Return the metrics as a table in Markdown."""
    lines = ["| metric | kind | labels | says |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.exported}` | {metric.kind.value} | {labels} | {metric.text} |")
    return "\n".join(lines)
