"""Plain requests of OpenAI's clients, which pass through no session actor: quotas, audit, metrics and operators see them all."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

import interpose
from interpose.rpc.operator import operator_transport
from interpose.v1 import operator_pb2
from tests.e2e.service import wait_for
from tests.e2e.tenancy.conftest import KEYS, RUNNING, WAITING, Deployed

pytestmark = pytest.mark.timeout(300)
AT_ONCE = 24


def endpoint(deployed: Deployed, tenant: str) -> openai.OpenAI:
    key = KEYS.get(tenant, f"{tenant}-key")
    return openai.OpenAI(base_url=deployed.running.http, api_key=key, max_retries=0, timeout=120)


def used(deployed: Deployed, tenant: str) -> dict[str, float]:
    key = KEYS.get(tenant, f"{tenant}-key")
    with interpose.connect(deployed.running.address, api_key=key, progress=False) as client:
        [own] = client.status().tenants
        return {"running": own.traces_running, **{quota.name: quota.used for quota in own.quotas}}


def traces(deployed: Deployed, method: str, request: object) -> object:
    transport = operator_transport(deployed.running.address, KEYS["boss"], 30.0)
    try:
        return transport.unary(method, request)
    finally:
        transport.close()


@pytest.mark.parametrize("stream", [False, True])
def test_of_many_at_once_exactly_so_many_run_or_wait(deployed: Deployed, stream: bool) -> None:
    with endpoint(deployed, "racer") as client, ThreadPoolExecutor(AT_ONCE) as pool:

        def run(number: int) -> str:
            extra = {"ignore_eos": True}
            try:
                answer = client.completions.create(
                    model="tiny", prompt=[5, 9, 2], max_tokens=500, stream=stream, extra_body=extra
                )
                if stream:
                    return "".join(chunk.choices[0].finish_reason or "" for chunk in answer if chunk.choices)
                return str(answer.choices[0].finish_reason)
            except openai.RateLimitError as error:
                return "refused" if int(error.response.headers["retry-after"]) > 0 else "refused for ever"

        told = list(pool.map(run, range(AT_ONCE)))
    assert told.count("length") >= RUNNING + WAITING and set(told) == {"length", "refused"}, told
    wait_for(lambda: not used(deployed, "racer")["running_traces"], 10)
    now = used(deployed, "racer")
    assert now["running"] == now["running_traces"] == now["waiting_traces"] == 0


def test_an_operator_lists_and_cancels_a_plain_request(deployed: Deployed) -> None:
    body = {"model": "tiny", "prompt": [5, 9, 2], "max_tokens": 500, "ignore_eos": True, "n": 16, "stream": True}
    headers = {"authorization": f"Bearer {KEYS['blue']}"}
    url = f"{deployed.running.http}/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        pieces = answer.iter_text()
        assert next(pieces)
        listed = traces(deployed, "ListTraces", operator_pb2.ListTracesRequest(tenant="blue"))
        [row] = listed.traces  # type: ignore[attr-defined]
        assert (row.tenant, row.method, row.followed) == ("blue", "openai", True)
        assert traces(deployed, "CancelTrace", operator_pb2.CancelTraceRequest(key=row.key)).found  # type: ignore[attr-defined]
        rest = "".join(pieces)
    assert "cancelled" in rest and "[DONE]" not in rest
    wait_for(lambda: not used(deployed, "blue")["running"], 10)
    status = deployed.running.status()
    wait_for(lambda: not any(model.running for model in deployed.running.status().models), 10)
    assert status.models


def test_each_plain_request_is_audited_and_counted(deployed: Deployed) -> None:
    def total() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{deployed.metrics_port}/metrics", timeout=20) as reply:
            lines = reply.read().decode().splitlines()
        found = [
            line for line in lines if 'method="openai"' in line and 'outcome="done"' in line and 'tenant="red"' in line
        ]
        return sum(float(line.split()[-1]) for line in found if "interpose_traces_total" in line)

    def audited() -> int:
        texts = [path.read_text() for path in deployed.files.glob("audit-*.jsonl*")]
        lines = [json.loads(line) for text in texts for line in text.splitlines()]
        return sum(line.get("method") == "openai" and line.get("tenant") == "red" for line in lines)

    before, lines = total(), audited()
    with endpoint(deployed, "red") as client:
        for _ in range(5):
            assert client.completions.create(model="tiny", prompt=[5, 9, 2], max_tokens=3).usage.completion_tokens
    assert audited() - lines == 5
    wait_for(lambda: total() - before == 5, 30)
