"""What operators see and do: metrics by a real scrape, log lines, audit log, spans on every hop, and the operator's calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace as tracing
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

import interpose
from actors.telemetry.metrics import METRICS, Kind
from interpose.contract.errors import NotFound, PermissionDenied, ServiceFailure, Unauthenticated, Unavailable
from interpose.rpc.operator import operator_transport
from interpose.v1 import operator_pb2 as pb
from tests.e2e.service import wait_for
from tests.e2e.tenancy.conftest import KEYS, QUOTAS, Deployed
from tests.e2e.test_calls import trace

pytestmark = pytest.mark.timeout(500)

PROMPT = "one two three"
# Metrics of what a service on a CPU has not, or of what has not happened to it.
ABSENT = {
    "sandbox_kills",
    "graph_captures",
    "graph_steps",
    "graph_evictions",
    "graphs",
    "graph_bytes",
}

Sample = tuple[str, dict[str, str], float]


class Watched:
    """A service, and what it writes for operators.

    Attributes:
        running: the service.
        folder: the folder of its files.
    """

    def __init__(self, deployed: Deployed) -> None:
        self.running = deployed.running
        self.folder = deployed.files
        self._port = deployed.metrics_port

    def client(self, tenant: str) -> interpose.Client:
        return interpose.connect(self.running.address, KEYS[tenant], progress=False)

    def scrape(self) -> list[Sample]:
        """What Prometheus gets."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=20) as reply:
            families = text_string_to_metric_families(reply.read().decode())
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name with some labels."""
        return sum(value for found, has, value in self.scrape() if found == name and labels.items() <= has.items())

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The JSON lines of some files, by time: each process writes a file of its own."""
        texts = (path.read_text() for path in self.folder.glob(f"{name}-*.jsonl*"))
        lines = [json.loads(line) for text in texts for line in text.splitlines()]
        return sorted(lines, key=lambda line: str(line.get("time", "")))

    def ask(self, method: str, request: Any, key: str = KEYS["boss"]) -> Any:
        transport = operator_transport(self.running.address, key, 30.0)
        try:
            return transport.unary(method, request)
        finally:
            transport.close()

    def command(self, *arguments: str, key: str = KEYS["boss"]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "interpose.cli", *arguments]
        command += ["--address", self.running.address, "--api-key", key]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def client_spans() -> InMemorySpanExporter:
    """The spans of this process, as a notebook that uses OpenTelemetry has them."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.set_tracer_provider(provider)
    return exporter


@pytest.fixture(scope="module")
def watched(deployed: Deployed, client_spans: InMemorySpanExporter) -> Watched:
    found = Watched(deployed)
    work(found)
    return found


def work(watched: Watched) -> None:
    """Run traces that end in different ways."""
    with watched.client("red") as client:
        model = client.model()
        for _ in range(2):
            with model.trace(PROMPT, max_tokens=3, ignore_eos=True) as tracer:
                for _ in tracer.iter[:]:
                    model.logits.output[0, 0].save()
        with model.trace(max_tokens=2, ignore_eos=True) as tracer:
            with tracer.invoke(PROMPT):
                one = model.model.layers[0].output[0].save()
            with tracer.invoke(PROMPT):
                two = model.model.layers[1].output[0].save()
        with model.trace([5] * 300, max_tokens=1):
            large = model.model.layers[0].output[0].save()
        with model.scan(PROMPT):
            model.model.layers[0].output[0].shape
    with watched.client("blue") as client:
        model = client.model()
        with pytest.raises(interpose.InterventionError), model.trace(PROMPT, max_tokens=2):
            1 // 0
    wrong = trace(no_such_parameter=1)
    wrong.model = "tiny"
    with pytest.raises(ServiceFailure, match="unknown sampling parameter"):
        watched.running.submit(wrong, metadata=(("x-api-key", KEYS["blue"]),))
    with pytest.raises(Unauthenticated):
        interpose.connect(watched.running.address, "nobody's key at all", progress=False)


def test_traces_are_counted_by_tenant_model_method_and_outcome(watched: Watched) -> None:
    name = "ray_interpose_traces_total"
    wait_for(lambda: watched.total(name) >= 6, 40)
    assert watched.total(name, tenant="red", model="tiny", method="trace", outcome="done") == 4
    assert watched.total(name, tenant="red", model="tiny", method="scan", outcome="done") == 1
    assert watched.total(name, tenant="blue", model="tiny", method="trace", outcome="failed") == 1
    assert watched.total(name) == 6
    assert watched.total("ray_interpose_invokes_total", tenant="red") == 6
    assert watched.total("ray_interpose_saved_bytes_total", tenant="red") == 300 * 128 * 4
    assert watched.total("ray_interpose_tokens_total", tenant="red", kind="generated") == 2 * 3 + 2 * 2 + 1
    steps = {
        tier: watched.total("ray_interpose_steps_total", tenant="red", tier=tier) for tier in ("block", "plan", "idle")
    }
    assert sum(steps.values()) >= 8 and steps["block"] + steps["plan"] > 0
    assert watched.total("ray_interpose_block_seconds_total", tenant="red") > 0
    assert watched.total("ray_interpose_queue_seconds_count", tenant="red") == 5
    assert watched.total("ray_interpose_running_seconds_count", tenant="blue") == 1


def test_refused_calls_are_counted(watched: Watched) -> None:
    name = "ray_interpose_refusals_total"
    wait_for(lambda: watched.total(name, code="INVALID_ARGUMENT") >= 1, 40)
    assert watched.total(name, tenant="blue", method="Submit", code="INVALID_ARGUMENT") == 1


def test_gauges_tell_what_is_there_now(watched: Watched) -> None:
    with watched.client("red") as client, client.session() as session:
        model = client.model()
        with model.trace(PROMPT, max_tokens=1):
            kept = model.model.layers[0].output[0].save()
        assert session.id
        wait_for(lambda: watched.total("ray_interpose_sessions", tenant="red") >= 1, 40)
        wait_for(lambda: watched.total("ray_interpose_stored_bytes", tenant="red") > 0, 40)
    assert watched.total("ray_interpose_replicas", model="tiny", state="running") == 1
    assert watched.total("ray_interpose_session_actors") >= 1
    wait_for(lambda: watched.total("ray_interpose_sessions", tenant="red") == 0, 40)


def test_a_scrape_has_each_metric_with_its_labels(watched: Watched) -> None:
    samples = watched.scrape()
    for metric in METRICS:
        if metric.name.removeprefix("interpose_") in ABSENT:
            continue
        name = metric.exported + ("_count" if metric.kind is Kind.HISTOGRAM else "")
        found = [labels for sample, labels, _ in samples if sample == name]
        assert found, name
        assert all(set(metric.labels) <= labels.keys() for labels in found), name


def test_vllms_own_metrics_are_beside(watched: Watched) -> None:
    names = {name for name, _, _ in watched.scrape()}
    assert {
        "ray_vllm_num_requests_running",
        "ray_vllm_generation_tokens_total",
        "ray_vllm_kv_cache_usage_perc",
    } <= names


def test_each_trace_is_a_line(watched: Watched) -> None:
    wait_for(lambda: len(watched.lines("traces")) >= 6, 20)
    lines = watched.lines("traces")
    red = [line for line in lines if line["tenant"] == "red" and line["method"] == "trace" and line["invokes"] == 1]
    assert {line["outcome"] for line in red} == {"done"}
    first = next(line for line in red if line["generated_tokens"] > 1)
    assert (first["model"], first["generated_tokens"], first["code"]) == ("tiny", 3, "")
    assert first["running_seconds"] > 0 and sum(first["tiers"].values()) == 3
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    [failed] = [line for line in lines if line["tenant"] == "blue"]
    assert (failed["outcome"], failed["code"]) == ("failed", "INTERVENTION")


def test_what_ran_is_in_the_audit_log(watched: Watched) -> None:
    lines = [line for line in watched.lines("audit") if line["action"] == "trace"]
    red = [line for line in lines if line["tenant"] == "red"]
    programs = [line["program"] for line in red if line["method"] == "trace" and line["invokes"] == 1]
    assert re.fullmatch("sha256:[0-9a-f]{64}", programs[0])
    assert programs[0] == programs[1], "the same block sent twice"
    assert len({line["program"] for line in red}) > 1
    traces = {line["trace"] for line in watched.lines("traces")}
    assert {line["trace"] for line in red} <= traces | {line["trace"] for line in lines}
    assert not any(key in path.read_text() for path in watched.folder.iterdir() for key in KEYS.values())
    assert {path.stat().st_mode & 0o777 for path in watched.folder.iterdir()} == {0o600}


def test_a_trace_has_a_span_on_every_hop(watched: Watched, client_spans: InMemorySpanExporter) -> None:
    client_spans.clear()
    with watched.client("red") as client:
        model = client.model()
        with tracing.get_tracer("notebook").start_as_current_span("notebook"):
            with model.trace(PROMPT, max_tokens=2, ignore_eos=True):
                value = model.model.layers[0].output[0].save()
    mine = {span.name: span for span in client_spans.get_finished_spans()}
    trace_id = f"0x{mine['interpose.trace'].context.trace_id:032x}"
    assert mine["interpose.trace"].parent.span_id == mine["notebook"].context.span_id

    def found() -> dict[str, dict[str, Any]]:
        return {span["name"]: span for span in watched.lines("spans") if span["context"]["trace_id"] == trace_id}

    wait_for(lambda: found().keys() == {"ingress", "session", "engine", "worker"}, 20)
    spans = found()
    client = f"0x{mine['interpose.trace'].context.span_id:016x}"
    parents = [client, *(spans[name]["context"]["span_id"] for name in ("ingress", "session", "engine"))]
    assert [spans[name]["parent_id"] for name in ("ingress", "session", "engine", "worker")] == parents
    assert spans["worker"]["attributes"]["steps.block"] + spans["worker"]["attributes"].get("steps.plan", 0) > 0
    assert spans["session"]["attributes"]["outcome"] == "done"
    assert spans["engine"]["resource"]["attributes"]["service.name"] == "interpose-engine"


def test_ordinary_tenants_may_not_call_what_operators_call(watched: Watched) -> None:
    requests = {
        "ListTraces": pb.ListTracesRequest(),
        "CancelTrace": pb.CancelTraceRequest(key="x"),
        "Drain": pb.DrainRequest(),
        "ListTenants": pb.ListTenantsRequest(),
        "GetUsage": pb.GetUsageRequest(),
    }
    assert requests.keys() == {method.name for method in pb.DESCRIPTOR.services_by_name["Operator"].methods}
    for method, request in requests.items():
        with pytest.raises(PermissionDenied, match="operator"):
            watched.ask(method, request, KEYS["red"])
        with pytest.raises(Unauthenticated):
            watched.ask(method, request, "")
    refused = watched.command("traces", key=KEYS["blue"])
    assert refused.returncode == 1 and "operator" in refused.stderr and "Traceback" not in refused.stderr


def test_an_operator_lists_and_cancels_the_traces_of_others(watched: Watched) -> None:
    with watched.client("red") as client:
        model = client.model()
        with model.trace(PROMPT, max_tokens=400, ignore_eos=True, blocking=False) as tracer:
            for _ in tracer.iter[:]:
                model.logits.output[0, 0].save()
        job = tracer.job
        reply = watched.ask("ListTraces", pb.ListTracesRequest(tenant="red"))
        [row] = reply.traces
        assert (row.tenant, row.method, row.status.model) == ("red", "job", "tiny") and reply.total == 1
        assert not watched.ask("ListTraces", pb.ListTracesRequest(tenant="blue")).traces
        assert not watched.ask("ListTraces", pb.ListTracesRequest(model="other")).traces
        listed = watched.command("traces")
        assert row.key in listed.stdout and listed.returncode == 0
        cancelled = watched.command("cancel", row.key)
        assert cancelled.stdout == f"{row.key}: cancelled\n"
        with pytest.raises(interpose.Cancelled):
            job.result()
        job.forget()
        assert watched.command("cancel", row.key).stdout == f"{row.key}: does not run\n"
        assert watched.command("traces").stdout == "no trace waits or runs\n"
    assert [line["trace"] for line in watched.lines("audit") if line["action"] == "cancel"] == [row.key, row.key]


def test_a_drained_service_takes_no_new_traces_and_finishes_the_others(watched: Watched) -> None:
    def traced(client: interpose.Client) -> None:
        served = client.model()
        with served.trace(PROMPT, max_tokens=1):
            served.logits.output.save()

    with watched.client("red") as client:
        model = client.model()
        with model.trace(PROMPT, max_tokens=150, ignore_eos=True, blocking=False) as tracer:
            for _ in tracer.iter[:]:
                tokens = model.logits.output[0, 0].save()
        drained = watched.command("drain", "--model", "tiny")
        assert drained.stdout.startswith("draining: tiny; ") and drained.returncode == 0
        another = trace(max_tokens=1)
        another.model = "tiny"
        with pytest.raises(ServiceFailure, match="draining"):
            watched.running.submit(another, metadata=(("x-api-key", KEYS["red"]),))
        assert "draining: tiny; 0 still running" in watched.command("drain", "--model", "tiny", "--wait").stdout
        assert tracer.job.result() is not None
        tracer.job.forget()
        assert watched.command("drain", "--model", "tiny", "--end").stdout == "draining: nothing\n"
        wait_for(lambda: watched.ask("ListTraces", pb.ListTracesRequest()).total == 0, 20)
        traced(client)
    assert watched.command("drain").stdout == "draining: service; 0 still running\n"
    with watched.client("blue") as client, pytest.raises(Unavailable, match="draining"):
        client.own_session.open()
    replica = watched.command("drain", "--end").stdout
    assert replica == "draining: nothing\n"
    with watched.client("blue") as client:
        traced(client)


def test_one_replica_is_drained(watched: Watched) -> None:
    with pytest.raises(NotFound, match="has no replica"):
        watched.ask("Drain", pb.DrainRequest(model="tiny", replica="none"))
    with pytest.raises(NotFound, match="there is no model"):
        watched.ask("Drain", pb.DrainRequest(model="none"))
    with watched.client("red") as client:
        [model] = client.status().models
    [replica] = model.each
    reply = watched.ask("Drain", pb.DrainRequest(model="tiny", replica=replica.name))
    assert reply.draining == [f"tiny/{replica.name}"]
    with watched.client("red") as client:
        assert client.status().models[0].state == "DRAINING"
    assert not watched.ask("Drain", pb.DrainRequest(model="tiny", replica=replica.name, end=True)).draining


def test_tenants_and_their_usage(watched: Watched) -> None:
    rows = {row.use.name: row for row in watched.ask("ListTenants", pb.ListTenantsRequest()).tenants}
    assert rows.keys() == KEYS.keys() | QUOTAS.keys()
    assert [name for name, row in rows.items() if row.operator] == ["boss"]
    assert rows["red"].use.quotas and rows["red"].keys == 1 and rows["red"].use.traces_done >= 4
    usage = watched.ask("GetUsage", pb.GetUsageRequest())
    red = next(row for row in usage.rows if row.tenant == "red")
    assert red.model == "tiny" and red.traces >= 4 and red.generated_tokens >= 10 and red.steps >= 10
    assert [row.tenant for row in watched.ask("GetUsage", pb.GetUsageRequest(tenant="blue")).rows] == ["blue"]
    assert any(one.code == "PERMISSION_DENIED" and one.tenant == "red" for one in usage.refusals)
    printed = watched.command("usage").stdout + watched.command("tenants").stdout
    assert "red" in printed and "PERMISSION_DENIED" in printed and "none, operator" in printed


def test_hostile_requests_of_operators_are_refused(watched: Watched) -> None:
    long = "x" * 10_000
    for method, request in (
        ("ListTraces", pb.ListTracesRequest(tenant=long)),
        ("ListTraces", pb.ListTracesRequest(most=1 << 31)),
        ("CancelTrace", pb.CancelTraceRequest(key=long)),
        ("CancelTrace", pb.CancelTraceRequest()),
        ("Drain", pb.DrainRequest(model=long)),
        ("Drain", pb.DrainRequest(replica="a replica without a model")),
        ("GetUsage", pb.GetUsageRequest(tenant=long)),
    ):
        with pytest.raises(interpose.InvalidArgument):
            watched.ask(method, request)


def test_the_processes_log_json_lines(watched: Watched) -> None:
    logs = [
        Path(file.path)
        for name in ("SessionHost", "engine", "ingress")
        for process in watched.running.processes(name)
        for file in process.open_files()
        if re.fullmatch(r"worker-.*\.err", Path(file.path).name)
    ]
    found = [json.loads(line) for path in set(logs) for line in path.read_text().splitlines() if line.startswith("{")]
    begun = {line["message"] for line in found if line["logger"] == "actors.telemetry.telemetry"}
    assert {"a process begins: session", "a process begins: engine", "a process begins: ingress"} <= begun
    assert all({"time", "level", "process"} <= line.keys() for line in found)
