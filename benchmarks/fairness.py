"""How long a small tenant's traces take beside a greedy tenant's.

A tenant runs one short trace a second: alone, beside a tenant without quotas that has submitted 200 long jobs which save much,
and beside a tenant with the same jobs that may have one of them running. The service has two ingress replicas and one worker.
The figures are the milliseconds of the short traces, and their ratio to those alone.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice

import interpose
from benchmarks.models import prompts
from benchmarks.served import Service
from benchmarks.service import latency

SECONDS = 20.0  # of each case
JOBS = 200
JOB_TOKENS = 480
SHORT_TOKENS = 8
PROMPT_TOKENS = 16
RUNNING = 1
ASKING = 60  # traces


def run(*, seconds: float | None = None) -> dict[str, dict[str, float]]:
    """Return the figures of each case.

    Args:
        seconds: of each case.
    """
    seconds = seconds or SECONDS
    quotas: dict[str, dict[str, float]] = {"small": {}, "greedy": {}, "bounded": {"running_traces": RUNNING}}
    service = Service(
        1,
        2,
        {"enforce_eager": True, "max_model_len": 512},
        tenants=[{"name": name, "api_key": _key(name), "quotas": own} for name, own in quotas.items()],
        settings={"ingress_replicas": 2},
        model={"sandbox": "off"},
        sessions={"stored_bytes": 64 << 30},
    )
    with ExitStack() as stack:
        stack.callback(service.close)
        address = service.address()
        clients = {
            name: stack.enter_context(interpose.connect(address, api_key=_key(name), progress=False)) for name in quotas
        }
        models = {name: client.model() for name, client in clients.items()}
        for name in quotas:
            _short(models[name])  # opens the session and warms up
        figures = _asking(models)
        alone = _short_traces(models["small"], seconds)
        figures["a short trace a second, alone"] = latency(alone)
        for name in ("greedy", "bounded"):
            with _jobs(models[name]) as running:
                beside = latency(_short_traces(models["small"], seconds))
                still = sum(job.status().state in ("running", "queued") for job in running)
            ratio = beside["p95 ms"] / latency(alone)["p95 ms"]
            figures[f"beside {JOBS} long jobs, {_what(name)}"] = beside | {"p95 ratio": ratio, "jobs left": still}
        again = _short_traces(models["small"], seconds)
        figures["alone again, the control"] = latency(again) | {
            "p95 ratio": latency(again)["p95 ms"] / latency(alone)["p95 ms"]
        }
    return figures


def _asking(models: Mapping[str, interpose.Model]) -> dict[str, dict[str, float]]:
    """Return what it costs to ask the account: traces with and without a quota, by turns."""
    took: dict[str, list[float]] = {"small": [], "bounded": []}
    for _ in range(ASKING):
        for name, seconds in took.items():
            seconds.append(_short(models[name]))
    ratio = statistics.median(took["bounded"]) / statistics.median(took["small"])
    return {
        "one trace after another, no quota": latency(took["small"]),
        "one trace after another, a quota": latency(took["bounded"]) | {"p50 ratio": ratio},
    }


def _short(model: interpose.Model) -> float:
    """Run a short trace; return its seconds."""
    [prompt] = islice(prompts(PROMPT_TOKENS), 1)
    began = time.perf_counter()
    with model.trace(prompt, max_tokens=SHORT_TOKENS, ignore_eos=True):
        hidden = model.model.layers[1].output[0].save()
    assert hidden is not None
    return time.perf_counter() - began


def _short_traces(model: interpose.Model, seconds: float) -> list[float]:
    """Run one short trace a second; return their seconds."""
    took = []
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        took.append(_short(model))
        time.sleep(max(0.0, began + 1.0 - time.monotonic()))
    return took


@contextlib.contextmanager
def _jobs(model: interpose.Model) -> Iterator[list[interpose.Job]]:
    """Submit long jobs that save every layer in every step; cancel and forget them at the end."""
    running = []
    for prompt in islice(prompts(PROMPT_TOKENS), JOBS):
        with model.trace(prompt, max_tokens=JOB_TOKENS, ignore_eos=True, blocking=False) as tracer:
            rows = [].save()
            for _ in tracer.iter[:]:
                for layer in model.model.layers:
                    rows.append(layer.output[0])
        running.append(tracer.job)
    try:
        yield running
    finally:
        for job in running:
            job.forget()


def _key(tenant: str) -> str:
    return f"{tenant}-fairness-key"


def _what(tenant: str) -> str:
    return f"{RUNNING} may run" if tenant == "bounded" else "no quota"
