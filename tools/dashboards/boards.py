"""The dashboards: an overview of the service, its tenants, and its engines.

They are made of `actors.telemetry.metrics` and of vLLM's metrics under Ray's names, with Grafana's own library for the form.
"""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from actors.telemetry import metrics
from actors.telemetry.metrics import Metric

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_TENANT, _MODEL = 'tenant=~"$tenant"', 'model=~"$model"'
_WIDE, _HIGH, _LOW = 12, 8, 4  # of a panel, in Grafana's 24 columns and its rows


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: what it shows.
        unit: Grafana's name of the unit.
        queries: expressions of PromQL, by the text of their legend.
        single: whether it shows one number, not a curve.
    """

    title: str
    unit: str
    queries: dict[str, str]
    single: bool = False


def _rate(metric: Metric, by: str, *where: str) -> str:
    return f"sum by ({by}) (rate({metric.exported}{{{', '.join(where)}}}[$__rate_interval]))"


def _sum(metric: Metric, by: str, *where: str) -> str:
    return f"sum by ({by}) ({metric.exported}{{{', '.join(where)}}})"


def _quantile(part: float, metric: Metric, by: str, *where: str) -> str:
    buckets = f"rate({metric.exported}_bucket{{{', '.join(where)}}}[$__rate_interval])"
    return f"histogram_quantile({part}, sum by (le, {by}) ({buckets}))"


def _overview() -> list[Panel]:
    of = _TENANT, _MODEL
    all_traces = f"sum(rate({metrics.TRACES.exported}{{{', '.join(of)}}}[$__rate_interval]))"
    failed = f'sum(rate({metrics.TRACES.exported}{{{", ".join(of)}, outcome="failed"}}[$__rate_interval]))'
    return [
        Panel("Traces per second", "ops", {"": all_traces}, single=True),
        Panel("Failed traces", "percentunit", {"": f"{failed} / {all_traces}"}, single=True),
        Panel("Traces that wait or run", "none", {"": f"sum({metrics.RUNNING.exported}{{{_TENANT}}})"}, single=True),
        Panel("Open sessions", "none", {"": f"sum({metrics.SESSIONS.exported}{{{_TENANT}}})"}, single=True),
        Panel("Traces by outcome", "ops", {"{{outcome}}": _rate(metrics.TRACES, "outcome", *of)}),
        Panel("Traces by method", "ops", {"{{method}}": _rate(metrics.TRACES, "method", *of)}),
        Panel(
            "Seconds in the queue",
            "s",
            {
                f"p{part * 100:g} {{{{model}}}}": _quantile(part, metrics.QUEUE_SECONDS, "model", *of)
                for part in (0.5, 0.95)
            },
        ),
        Panel(
            "Seconds from the first block to the end",
            "s",
            {
                f"p{part * 100:g} {{{{model}}}}": _quantile(part, metrics.RUNNING_SECONDS, "model", *of)
                for part in (0.5, 0.95)
            },
        ),
        Panel("Tokens", "ops", {"{{kind}}": _rate(metrics.TOKENS, "kind", *of)}),
        Panel("Steps by tier", "ops", {"{{tier}}": _rate(metrics.STEPS, "tier", *of)}),
        Panel("Refused calls", "ops", {"{{method}} {{code}}": _rate(metrics.REFUSALS, "method, code")}),
        Panel("Replicas", "none", {"{{model}} {{state}}": _sum(metrics.REPLICAS, "model, state", _MODEL)}),
    ]


def _tenants() -> list[Panel]:
    of = _TENANT, _MODEL
    return [
        Panel("Traces", "ops", {"{{tenant}}": _rate(metrics.TRACES, "tenant", *of)}),
        Panel("Failed traces", "ops", {"{{tenant}}": _rate(metrics.TRACES, "tenant", *of, 'outcome="failed"')}),
        Panel("Traces that wait or run", "none", {"{{tenant}}": _sum(metrics.RUNNING, "tenant", _TENANT)}),
        Panel("Seconds in the queue, p95", "s", {"{{tenant}}": _quantile(0.95, metrics.QUEUE_SECONDS, "tenant", *of)}),
        Panel("Tokens", "ops", {"{{tenant}} {{kind}}": _rate(metrics.TOKENS, "tenant, kind", *of)}),
        Panel("Steps of blocks", "ops", {"{{tenant}} {{tier}}": _rate(metrics.STEPS, "tenant, tier", *of)}),
        Panel(
            "Part of the time for which forward passes wait for blocks",
            "percentunit",
            {"{{tenant}} {{model}}": _rate(metrics.BLOCK_SECONDS, "tenant, model", *of)},
        ),
        Panel("Saved bytes", "Bps", {"{{tenant}}": _rate(metrics.SAVED_BYTES, "tenant", *of)}),
        Panel("Stored bytes", "bytes", {"{{tenant}}": _sum(metrics.STORED_BYTES, "tenant", _TENANT)}),
        Panel("Open sessions", "none", {"{{tenant}}": _sum(metrics.SESSIONS, "tenant", _TENANT)}),
        Panel(
            "Refused calls",
            "ops",
            {"{{tenant}} {{code}} {{limit}}": _rate(metrics.REFUSALS, "tenant, code, limit", _TENANT)},
        ),
        Panel("Invokes", "ops", {"{{tenant}}": _rate(metrics.INVOKES, "tenant", *of)}),
    ]


def _engines() -> list[Panel]:
    vllm = 'model_name=~".*"'
    return [
        Panel(
            "Invokes on the replicas",
            "none",
            {"{{model}} {{state}}": _sum(metrics.ENGINE_INVOKES, "model, state", _MODEL)},
        ),
        Panel("Replicas", "none", {"{{model}} {{state}}": _sum(metrics.REPLICAS, "model, state", _MODEL)}),
        Panel(
            "Requests in vLLM",
            "none",
            {
                "running {{model_name}}": f"sum by (model_name) (ray_vllm_num_requests_running{{{vllm}}})",
                "waiting {{model_name}}": f"sum by (model_name) (ray_vllm_num_requests_waiting{{{vllm}}})",
            },
        ),
        Panel(
            "Tokens of vLLM",
            "ops",
            {
                "generated {{model_name}}": "sum by (model_name) "
                f"(rate(ray_vllm_generation_tokens_total{{{vllm}}}[$__rate_interval]))",
                "prompt {{model_name}}": "sum by (model_name) "
                f"(rate(ray_vllm_prompt_tokens_total{{{vllm}}}[$__rate_interval]))",
            },
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            {"{{model_name}}": f"max by (model_name) (ray_vllm_kv_cache_usage_perc{{{vllm}}})"},
        ),
        Panel(
            "Seconds to the first token, p95",
            "s",
            {
                "{{model_name}}": "histogram_quantile(0.95, sum by (le, model_name) "
                f"(rate(ray_vllm_time_to_first_token_seconds_bucket{{{vllm}}}[$__rate_interval])))"
            },
        ),
        Panel("Steps of blocks by tier", "ops", {"{{model}} {{tier}}": _rate(metrics.STEPS, "model, tier", _MODEL)}),
        Panel(
            "Steps with blocks on the workers",
            "ops",
            {"{{model}} {{how}}": _rate(metrics.GRAPH_STEPS, "model, how", _MODEL)},
        ),
        Panel(
            "Captures of graphs",
            "ops",
            {"{{model}} {{result}}": _rate(metrics.GRAPH_CAPTURES, "model, result", _MODEL)},
        ),
        Panel(
            "Graphs in the caches",
            "none",
            {
                "{{model}}": _sum(metrics.GRAPHS, "model", _MODEL),
                "given way {{model}}": _rate(metrics.GRAPH_EVICTIONS, "model", _MODEL),
            },
        ),
        Panel("Memory of graphs", "bytes", {"{{model}}": _sum(metrics.GRAPH_BYTES, "model", _MODEL)}),
        Panel(
            "Sandboxed processes",
            "ops",
            {
                "given to traces {{model}}": _rate(metrics.SANDBOX_STARTS, "model", _MODEL),
                "ended {{model}}": _rate(metrics.SANDBOX_KILLS, "model", _MODEL),
            },
        ),
        Panel("Session actors", "none", {"actors": f"sum({metrics.ACTORS.exported})"}),
    ]


def boards() -> dict[str, str]:
    """Return the dashboards as JSON, by the names of their files."""
    made = {"overview": ("Interpose: overview", _overview()), "tenants": ("Interpose: tenants", _tenants())}
    made["engines"] = ("Interpose: engines", _engines())
    return {name: _board(name, title, panels) for name, (title, panels) in made.items()}


def _board(name: str, title: str, panels: list[Panel]) -> str:
    board = (
        dashboard.Dashboard(title)
        .uid(f"interpose-{name}")
        .tags(["interpose"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_variable("tenant", metrics.TRACES))
        .with_variable(_variable("model", metrics.TRACES))
    )
    for panel in panels:
        board = board.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _variable(label: str, metric: Metric) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(label)
        .label(label)
        .datasource(_SOURCE)
        .query(f"label_values({metric.exported}, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
    )


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    kind = stat.Panel() if panel.single else timeseries.Panel()
    made = kind.title(panel.title).unit(panel.unit).datasource(_SOURCE)
    made = made.span(_WIDE // 2 if panel.single else _WIDE).height(_LOW if panel.single else _HIGH)
    for letter, (legend, expression) in zip("ABCDEFGH", panel.queries.items(), strict=False):
        made = made.with_target(prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter))
    return made
