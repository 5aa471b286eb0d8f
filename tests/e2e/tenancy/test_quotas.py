"""Quotas of tenants over a whole service with two ingress replicas: exact, and nothing is owed when a part of it dies.

The tests of operators come before: what runs here would be in their counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import openai
import pytest

import interpose
from interpose.v1 import service_pb2
from tests.e2e.service import RunningService, wait_for
from tests.e2e.tenancy.conftest import (
    KEPT_SESSIONS,
    RESERVED_SESSIONS,
    RUNNING,
    STORED,
    TOKENS,
    WAITING,
    Deployed,
)

pytestmark = pytest.mark.timeout(500)

THREADS = 64


@pytest.fixture(scope="module", autouse=True)
def alone(deployed: Deployed) -> None:
    """No session of another module's tests is open, so that all that are not reserved can be had."""
    wait_for(lambda: not deployed.running.status().sessions, 30)


def connected(service: RunningService, tenant: str) -> interpose.Client:
    return interpose.connect(service.address, api_key=f"{tenant}-key", progress=False)


def own(client: interpose.Client) -> service_pb2.TenantStatus:
    """The tenant's own line of the status."""
    [tenant] = client.status().tenants
    return tenant


def used(client: interpose.Client, name: str) -> float:
    return next(quota.used for quota in own(client).quotas if quota.name == name)


def long_job(model: interpose.Model, tokens: int = 400) -> interpose.Job:
    """Begin a job that takes long."""
    with model.trace("one two three", max_tokens=tokens, ignore_eos=True, blocking=False) as tracer:
        hidden = [].save()
        for _ in tracer.iter[:]:
            hidden.append(model.model.layers[0].output[0][-1, :2])
    return tracer.job


def at_once(count: int, call: Callable[[int], object]) -> list[object]:
    """Call from so many threads at once; return what each call returned or raised."""
    told: list[object] = [None] * count
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait()
        try:
            told[number] = call(number)
        except interpose.InterposeError as error:
            told[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_a_greedy_tenant_leaves_what_is_reserved_for_others(service: RunningService) -> None:
    """The first test here: jobs of others keep their sessions for long."""
    with connected(service, "greedy") as client:
        kept: list[interpose.SessionBlock] = []
        with pytest.raises(
            interpose.QuotaExceeded, match=rf"or reserved for other tenants \({RESERVED_SESSIONS}\)"
        ) as caught:
            for _ in range(KEPT_SESSIONS + RESERVED_SESSIONS):
                session = client.session()
                assert session.id
                kept.append(session)
        assert len(kept) == KEPT_SESSIONS and caught.value.retry_after > 0
        for tenant, count in (("racer", 4), ("spender", 2), ("keeper", 2)):
            with connected(service, tenant) as other:
                sessions = [other.session() for _ in range(count)]
                assert len({session.id for session in sessions}) == count
                for session in sessions:
                    session.close()
        for session in kept:
            session.close()


def test_of_sixty_four_threads_exactly_ten_get_a_quota_of_ten(service: RunningService) -> None:
    clients = [connected(service, "racer") for _ in range(4)]
    models = [client.model() for client in clients]
    told = at_once(THREADS, lambda number: long_job(models[number % 4]))
    jobs = [one for one in told if isinstance(one, interpose.Job)]
    refused = [one for one in told if isinstance(one, interpose.QuotaExceeded)]
    assert len(jobs) == RUNNING + WAITING and len(refused) == THREADS - len(jobs), told
    for error in refused:
        assert error.quota in ("waiting_traces", "running_traces") and error.limit and error.retry_after > 0
        assert f"quotas.{error.quota}" in error.message and error.used >= error.limit
    assert used(clients[0], "running_traces") == RUNNING and own(clients[0]).traces_waiting == WAITING
    [line] = [one for one in own(clients[0]).quotas if one.name == "waiting_traces"]
    assert line.refused == len(refused)
    for job in jobs:
        job.cancel()
    wait_for(lambda: used(clients[0], "running_traces") == used(clients[0], "waiting_traces") == 0, 20)
    assert models[0].generate("one two three", max_new_tokens=2).finish_reason
    for client in clients:
        client.close()


def test_requests_of_openai_clients_count_for_the_same_quota(service: RunningService) -> None:
    with openai.OpenAI(base_url=service.http, api_key="asker-key", max_retries=0, timeout=60) as asker:
        asked = {"model": "tiny", "prompt": [5, 9, 2], "max_tokens": 20, "extra_body": {"ignore_eos": True}}
        for _ in range(3):  # a prompt and 20 tokens each; what a request did not need is given back
            assert asker.completions.create(**asked).usage.completion_tokens == 20
        with connected(service, "asker") as client:
            wait_for(lambda: 0 < used(client, "tokens_per_minute") <= 3 * 23, 10)
        with pytest.raises(openai.RateLimitError, match="tokens_per_minute") as caught:
            asker.completions.create(**{**asked, "max_tokens": 60})
        assert 0 < int(caught.value.response.headers["retry-after"]) <= 60


def test_tokens_come_back_at_the_end_on_failure_and_on_cancel(service: RunningService) -> None:
    with connected(service, "spender") as client:
        model = client.model()
        jobs = [long_job(model, 500) for _ in range(7)]
        with pytest.raises(interpose.QuotaExceeded, match=r"quotas\.tokens_per_minute 4000") as caught:
            long_job(model, 500)
        error = caught.value
        assert error.quota == "tokens_per_minute" and error.limit == TOKENS and 0 < error.retry_after <= 60
        for job in jobs:
            job.cancel()
        wait_for(lambda: used(client, "tokens_per_minute") < TOKENS * 0.9, 20)
        with pytest.raises(interpose.InterventionError):
            with model.trace("one two three", max_tokens=500, ignore_eos=True):
                raise ValueError("at once")
        before = own(client).tokens
        result = model.generate("one two three", max_new_tokens=400, stop=["no such text"])
        needed = len(result.prompt_token_ids) + len(result.token_ids)
        assert own(client).tokens - before == needed
        wait_for(lambda: used(client, "tokens_per_minute") < TOKENS / 2, 60)


def test_nothing_is_owed_for_traces_of_parts_that_were_killed(service: RunningService) -> None:
    """An ingress replica under its client, then the session actor that runs a trace."""
    with connected(service, "racer") as client:
        model = client.model()
        job = long_job(model, 480)
        service.processes("ServeReplica:interpose:ingress")[0].kill()
        job.wait(timeout=120)
        assert job.status().state == "done"
        assert used(client, "running_traces") == 0
        jobs = [long_job(model, 480) for _ in range(RUNNING + 2)]
        assert used(client, "running_traces") == RUNNING
        for process in service.processes("ray::Session"):
            process.kill()
        wait_for(lambda: used(client, "running_traces") == used(client, "waiting_traces") == 0, 60)
        for job in jobs:
            assert job.status().state in ("failed", "done")
        assert model.generate("one two three", max_new_tokens=2).finish_reason


def test_stored_bytes_are_those_of_all_sessions(service: RunningService) -> None:
    with connected(service, "keeper") as client, connected(service, "keeper") as other:

        def keep(one: interpose.Client, size: int) -> interpose.Job:
            model = one.model()
            with model.trace("one two three", blocking=False) as tracer:
                much = model.model.layers[0].output[0].new_ones(size // 4).save()
            tracer.job.wait(timeout=60)
            return tracer.job

        first = keep(client, STORED // 2)
        assert STORED // 2 < used(client, "stored_bytes") < STORED
        with pytest.raises(interpose.QuotaExceeded, match=r"quotas\.stored_bytes"):
            keep(other, STORED // 2).result()
        first.forget()
        wait_for(lambda: used(client, "stored_bytes") < STORED // 4, 20)
        second = keep(other, STORED // 2)
        assert second.status().state == "done"
        second.forget()
