"""Failures between the parts: a client gets facts, never a traceback of ours."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from ray.exceptions import ActorDiedError, ObjectStoreFullError, OutOfDiskError, RayTaskError
from ray.serve.exceptions import BackPressureError

from actors.failures import describe, not_found, unavailable
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb


def test_lost_actors_are_retryable() -> None:
    failure = describe(ActorDiedError(), "t")
    assert failure.code == pb.ERROR_CODE_UNAVAILABLE
    assert failure.retry_after > 0
    assert (failure.trace_id, failure.invoke) == ("t", -1)


@pytest.mark.parametrize("error", [ObjectStoreFullError("full"), OutOfDiskError("full")])
def test_a_full_object_store_says_what_to_do(error: Exception) -> None:
    failure = describe(RayTaskError("f", "Traceback", error), "t")
    assert failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED and failure.retry_after > 0
    assert "no room left for saved values" in failure.message and failure.trace_id == "t"


def test_a_full_queue_says_when_to_come_back() -> None:
    failure = describe(BackPressureError(num_queued_requests=5, max_queued_requests=5))
    assert failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED
    assert failure.retry_after > 0


def test_a_failure_of_another_actor_is_unpacked() -> None:
    error = RayTaskError("f", "Traceback (most recent call last): secret", not_found("no such blob"))
    failure = describe(pickle.loads(pickle.dumps(error)), "t")
    assert failure.code == pb.ERROR_CODE_NOT_FOUND
    assert failure.message == "no such blob"
    assert failure.trace_id == "t"


def test_cancellation() -> None:
    assert describe(asyncio.CancelledError()).code == pb.ERROR_CODE_CANCELLED


def test_an_unexpected_error_keeps_its_details_to_the_log(caplog: object) -> None:
    failure = describe(RuntimeError("secret path /etc"))
    assert failure.code == pb.ERROR_CODE_ENGINE
    assert "secret" not in failure.message


def test_unavailable_says_so() -> None:
    error = ServiceFailure(unavailable("the engine is loading"))
    assert "try again" in describe(error).message
