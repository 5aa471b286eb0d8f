"""The dashboards: as their program writes them, in Grafana's form, with expressions that Prometheus understands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from actors.telemetry.metrics import METRICS, Kind
from tools.dashboards.boards import boards
from tools.k8s import render

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards" / "grafana"
FILES = sorted(FOLDER.glob("*.json"))


def expressions(board: dict[str, Any]) -> Iterator[str]:
    """The expressions of a dashboard's panels, with Grafana's own variables replaced."""
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "1m").replace("$tenant", ".*").replace("$model", ".*")


def selectors(expression: str) -> Iterator[promql_parser.VectorSelector]:
    """The selectors of an expression, at any depth."""
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    yield from found


def test_the_files_are_as_the_program_writes_them() -> None:
    assert {path.stem: path.read_text() for path in FILES} == boards()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_a_dashboard_of_grafana(path: Path) -> None:
    board = Dashboard.from_json(json.loads(path.read_text()))
    assert board.uid == f"interpose-{path.stem}" and board.panels
    assert all(panel.targets and panel.title for panel in board.panels)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_expressions_name_metrics_and_labels_that_there_are(path: Path) -> None:
    known = {metric.exported: metric for metric in METRICS}
    for expression in expressions(json.loads(path.read_text())):
        found = list(selectors(expression))
        assert found, expression
        for selector in found:
            if selector.name.startswith("ray_vllm_"):  # the test of a service looks for these
                continue
            metric = known.get(selector.name) or known[selector.name.removesuffix("_bucket")]
            assert (metric.kind is Kind.HISTOGRAM) == selector.name.endswith("_bucket"), expression
            assert {matcher.name for matcher in selector.matchers.matchers} <= set(metric.labels), expression


def test_every_metric_is_on_a_dashboard() -> None:
    text = "".join(path.read_text() for path in FILES)
    assert [metric.exported for metric in METRICS if metric.exported not in text] == []


def test_grafana_and_prometheus_find_their_files() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounted = [volume.split(":") for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    for source, target, *_ in mounted:
        assert not source.startswith("./") or (ROOT / source).exists()
        assert target.startswith("/")
    [provider] = yaml.safe_load((ROOT / "dashboards/provisioning/dashboards/interpose.yaml").read_text())["providers"]
    assert ["./dashboards/grafana", provider["options"]["path"], "ro"] in mounted
    scraped = yaml.safe_load((ROOT / "dashboards/prometheus.yml").read_text())["scrape_configs"][0]["dns_sd_configs"][0]
    nodes = {name for name in services if name.startswith("worker")} | {"head"}
    assert set(scraped["names"]) == nodes
    for name in nodes:
        assert f"--metrics-export-port={scraped['port']}" in str(services[name]["command"])


def test_kubernetes_gets_the_dashboards_and_lets_prometheus_in() -> None:
    dashboards, policy = sorted(render.render(ROOT / "k8s" / "monitoring"), key=lambda one: str(one["kind"]))
    assert dashboards["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert dashboards["data"] == {path.name: path.read_text() for path in FILES}
    [service] = [one for one in render.render(ROOT / "k8s" / "overlays" / "gpu") if one["kind"] == "RayService"]
    pods = service["spec"]["rayClusterConfig"]
    for group in (pods["headGroupSpec"], *pods["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["metadata"]["namespace"] == service["metadata"]["namespace"]
