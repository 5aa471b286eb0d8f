"""A notebook gets the tensors of a stack: with one transfer, or each by itself where they stay on the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import interpose
from interpose.v1 import trace_pb2
from interpose.v1.value_pb2 import Blob
from interpose.wire import stacks, views
from interpose.wire.encoder import Encoder
from tests.unit.interpose.conftest import finish

ROWS = [torch.full((rows, 4), float(i)) for i, rows in enumerate((5, 1, 1, 1))]


def stacked(service, _trace):
    """Save the rows as one stack in a blob, the server's way."""
    block = bytes(stacks.packed(ROWS))
    service.blobs["t/0/0"] = block
    encoder = Encoder(inline_bytes=0, put_blob=lambda data: "unused")
    encoder.stack(ROWS, stacks.layout(ROWS), Blob(id="t/0/0", size=len(block)))
    saves = trace_pb2.Saves()
    saves.names.add(name="rows", value=encoder.encode([*ROWS, ROWS[0]]))
    saves.objects.CopyFrom(encoder.objects)
    yield trace_pb2.Event(saves=saves)


def run(model, **options):
    with model.trace("Hello", **options):
        rows = [].save()
    return rows


def test_one_transfer_for_all(service, model):
    service.script = stacked
    rows = run(model)
    assert service.traces[0].stacks and len(service.fetched_from) == 1
    assert all(torch.equal(row, wanted) for row, wanted in zip(rows[:4], ROWS, strict=True))
    assert rows[4] is rows[0]
    rows[1] += 1
    assert torch.equal(rows[2], ROWS[2])


def test_each_stays_on_the_server_by_itself(service, model):
    service.script = stacked
    rows = run(model, fetch=False)
    assert not service.fetched_from and [tuple(row.shape) for row in rows] == [(5, 4), (1, 4), (1, 4), (1, 4), (5, 4)]
    assert rows[4] is rows[0] and isinstance(rows[0], interpose.RemoteValue)
    assert torch.equal(rows[2].fetch(), ROWS[2]) and service.sent_bytes == 16
    assert torch.equal(rows[0][2:, [1, 3]].fetch(), ROWS[0][2:, [1, 3]]) and service.sent_bytes == 16 + 24
    part = rows[3]
    for _ in range(16):
        part = part[...]
    assert torch.equal(part.fetch(), ROWS[3])


def test_small_tensors_come_also_where_large_tensors_stay(service, model):
    def small(service, trace):
        [event] = stacked(service, trace)
        event.saves.objects.values[0].stack.small = True
        yield event

    service.script = small
    rows = run(model, fetch=False)
    assert all(torch.equal(row, wanted) for row, wanted in zip(rows[:4], ROWS, strict=True))
    assert rows[4] is rows[0] and len(service.fetched_from) == 1


def test_a_part_goes_into_another_trace(service, model):
    service.script = stacked
    row = run(model, fetch=False)[2]
    service.script = finish
    with model.trace("Hello"):
        row.sum().save()
    [remote] = [value.remote for value in service.traces[1].scope.values if value.HasField("remote")] or [
        binding.value.remote
        for binding in service.traces[1].invokes[0].program.reads
        if binding.value.HasField("remote")
    ]
    block = np.frombuffer(service.blobs["t/0/0"], np.uint8)
    assert views.apply(block, remote.view).tobytes() == ROWS[2].numpy().tobytes()


def test_a_stack_that_does_not_fit_its_bytes(service, model):
    def broken(service, trace):
        [event] = stacked(service, trace)
        event.saves.objects.values[0].stack.rows[0] += 1
        yield event

    for fetch in (None, False):
        service.script = broken
        with pytest.raises(interpose.EngineError, match="bytes are not a stack"):
            run(model, fetch=fetch)
