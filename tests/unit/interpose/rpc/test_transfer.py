"""Large values travel in chunks, once, and go on where they were when the connection breaks."""

from __future__ import annotations

import hashlib

import grpc
import numpy as np
import pytest

import interpose
from interpose.v1.value_pb2 import Blob
from tests.unit.interpose.conftest import numbers


def test_uploads(service, model):
    big, same, other = numbers(5000), numbers(5000), numbers(70)
    with model.trace("x"):
        h = big, same, other
    digests = {f"sha256:{hashlib.sha256(array.tobytes()).hexdigest()}" for array in (big, other)}
    assert set(service.blobs) == digests


def test_an_upload_goes_on_after_a_break(service, model):
    big = numbers(5000)
    away = grpc.RpcError(grpc.StatusCode.UNAVAILABLE, "away")
    service.refusals["Upload"] = [away]
    with model.trace("x"):
        h = big
    assert list(service.blobs.values()) == [big.tobytes()]


def test_a_value_larger_than_the_server_takes(service, client):
    client.limits.max_upload_bytes = 1000
    big = numbers(1000)
    with pytest.raises(interpose.InvalidArgument, match="in one piece"):
        with client.model().trace("x"):
            h = big


def test_a_message_larger_than_the_server_takes(client):
    client.limits.max_message_bytes = 1000
    long = list(range(1000))
    with pytest.raises(interpose.InvalidArgument, match="MiB"):
        with client.model().trace("x"):
            h = long


def test_a_fetch_goes_on_where_it_broke(service, client):
    client.own_session.open()
    data = numbers(3000).tobytes()
    service.blobs["b"] = data
    service.fetch_breaks = 7  # more than the attempts without progress
    session_id = client.own_session.open()
    found = client.own_session.fetch(session_id, [Blob(id="b", size=len(data))])
    assert found["b"].tobytes() == data and found["b"].flags.writeable
    assert service.fetched_from == [0, 2000, 4000, 6000, 8000, 10000]


def test_many_blobs(service, client):
    session_id = client.own_session.open()
    service.blobs = {f"b{i}": numbers(300 * i).tobytes() for i in range(9)}
    found = client.own_session.fetch(session_id, [Blob(id=key, size=len(data)) for key, data in service.blobs.items()])
    assert {key: array.tobytes() for key, array in found.items()} == service.blobs


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_blob_of_another_size_than_announced(service, client, size):
    service.blobs["b"] = bytes(5000)
    with pytest.raises(interpose.EngineError, match="announced"):
        client.own_session.fetch(client.own_session.open(), [Blob(id="b", size=size)])


def test_a_fetch_that_never_works_ends(service, client, monkeypatch):
    monkeypatch.setattr("interpose.rpc.transfer.BACKOFF_SECONDS", (0, 0, 0, 0))
    session_id = client.own_session.open()
    service.refusals["Fetch"] = [grpc.RpcError(grpc.StatusCode.UNAVAILABLE, "away")] * 50
    with pytest.raises(interpose.Unavailable):
        client.own_session.fetch(session_id, [Blob(id="b", size=5)])


def test_one_blob_for_two_values_is_two_arrays(service, model):
    def script(service, trace):
        event = service.saves(0, a=numbers(1000), b=numbers(1000))
        tensors = [value.tensor for value in event.saves.objects.values]
        tensors[1].blob.id = tensors[0].blob.id
        yield event

    service.script = script
    with model.trace("x"):
        a = b = 1
    a[:] = 0
    assert np.asarray(b)[5] == 5


def test_malformed_saves(service, model):
    def script(service, trace):
        event = service.saves(0, a=numbers(10))
        event.saves.objects.values[0].tensor.shape[0] = 11
        yield event

    service.script = script
    with pytest.raises(interpose.EngineError, match="rebuilt"):
        with model.trace("x"):
            a = 1
