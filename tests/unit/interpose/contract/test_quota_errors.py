"""The error of a quota says which quota, its limit, its use and when to come back; also after a trip through pickle."""

from __future__ import annotations

import pickle

import pytest

from interpose.contract.errors import QuotaExceeded, failure, from_failure
from interpose.v1 import trace_pb2 as pb


def exceeded(fact: pb.Failure) -> QuotaExceeded:
    error = from_failure(fact)
    assert isinstance(error, QuotaExceeded)
    return error


@pytest.mark.parametrize("again", [False, True], ids=["raised", "pickled"])
def test_a_quota_that_is_reached(again: bool) -> None:
    quota = pb.QuotaUse(name="tokens_per_minute", limit=4000, used=3990.5)
    error = exceeded(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, "too many", retry_after=7.5, quota=quota, trace_id="t"))
    error = pickle.loads(pickle.dumps(error)) if again else error
    assert (error.quota, error.limit, error.used, error.retry_after) == ("tokens_per_minute", 4000, 3990.5, 7.5)
    assert (error.message, error.trace_id, error.status_name) == ("too many", "t", "RESOURCE_EXHAUSTED")


def test_another_limit_and_an_older_server_name_no_quota() -> None:
    error = exceeded(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, "the object store is full"))
    assert (error.quota, error.limit, error.used) == ("", 0.0, 0.0) and error.retry_after > 0
