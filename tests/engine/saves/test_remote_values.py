"""A tensor that an earlier trace saved is bound in a block by reference, with what indices leave of it."""

from __future__ import annotations

import numpy as np
import torch

from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT32, RemoteTensor, TensorView, Value
from interpose.wire import views as indexing
from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block, Ran, close


def remote(blob_id: str, value: torch.Tensor, dtype: int, *subscripts: object) -> Value:
    """A reference to a value, indexed."""
    view = TensorView(dtype=dtype, shape=value.shape)
    for subscript in subscripts:
        view.indices.append(indexing.index_of(subscript, indexing.check(view)))
    return Value(remote=RemoteTensor(blob_id=blob_id, view=view))


def test_a_block_reads_and_writes_with_what_another_trace_saved(bench: Bench) -> None:
    whole = torch.arange(6 * 128, dtype=torch.float32).reshape(6, 128) / 100
    uploads = bench.engine.worker.interpose_outbox.uploads
    data = np.frombuffer(whole.numpy().tobytes(), np.uint8)  # read-only, as the object store gives it
    uploads["kept/0/0"] = data
    uploads["kept/0/1"] = whole.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    layer = expression(bench.block(1)) + ".mlp"
    captured = {
        "row": remote("kept/0/0", whole, DTYPE_FLOAT32, -1),
        "rows": remote("kept/0/0", whole, DTYPE_FLOAT32, np.s_[1:], np.s_[:, [3, 0]]),
        "half": remote("kept/0/1", whole, DTYPE_BFLOAT16, np.s_[::2]),
    }
    source = f"""
        seen = (row.clone(), rows.clone(), half.clone()).save()
        row += 1
        {layer}.output[:] = row
        after = {layer}.output.save()
    """
    [ran] = bench.engine.run(Block([5, 6, 7], source, captured=captured))
    assert ran.failure is None
    row, rows, half = ran.saved["seen"]
    assert torch.equal(row, whole[-1]) and torch.equal(rows, whole[1:][:, [3, 0]])
    assert torch.equal(half, whole.to(torch.bfloat16)[::2])
    assert close(ran.saved["after"], (whole[-1] + 1).expand(ran.saved["after"].shape))
    assert data.tobytes() == whole.numpy().tobytes(), "the block's changes are its own"
    del uploads["kept/0/0"], uploads["kept/0/1"]


def test_bytes_that_are_no_such_tensor(bench: Bench) -> None:
    uploads = bench.engine.worker.interpose_outbox.uploads
    uploads["kept/0/0"] = bytes(7)
    captured = {"row": remote("kept/0/0", torch.zeros(2), DTYPE_FLOAT32)}
    [ran] = bench.engine.run(Block([5, 6, 7], "seen = row.save()", captured=captured))
    assert ran.failure is not None and "7 bytes are not a float32 array" in ran.failure.message
    del uploads["kept/0/0"]


def saves_of(ran: Ran) -> dict[int, pb.Saves]:
    """What a trace sent, by invoke, as it was sent."""
    events = [pb.Event.FromString(data) for data in ran.events]
    return {event.saves.invoke: event.saves for event in events if event.WhichOneof("kind") == "saves"}


def test_what_is_saved_again_as_it_was_stays_where_it_is(bench: Bench) -> None:
    whole = torch.arange(6 * 9000, dtype=torch.float32).reshape(6, 9000)
    outbox = bench.engine.worker.interpose_outbox
    outbox.uploads["kept/0/0"] = whole.numpy().tobytes()
    captured = {
        "row": remote("kept/0/0", whole, DTYPE_FLOAT32, -1),
        "rows": remote("kept/0/0", whole, DTYPE_FLOAT32, np.s_[1:]),
        "whole": remote("kept/0/0", whole, DTYPE_FLOAT32),
    }
    source = """
        same = [row, row].save()
        part = row[2:].save()
        rows[0] += 1
        changed = rows.save()
        whole[0, 0] += 1
        whole[0, 0] -= 1
        back = whole.save()
    """
    trace = bench.engine.trace([Block([], source, captured=captured)], {})
    [ran] = bench.engine.run_traces([[Block([5, 6, 7])]], captured=trace)
    saves = saves_of(ran)[0]
    found = {binding.name: saves.objects.values[binding.value.ref] for binding in saves.names}
    first, second = found["same"].list.items
    stayed = saves.objects.values[first.ref].remote
    assert first.ref == second.ref and stayed.blob_id == "kept/0/0" and stayed.view.indices[0].items[0].at == -1
    assert found["back"].remote.blob_id == "kept/0/0" and not found["back"].remote.view.indices
    assert found["part"].tensor.blob.size == 8998 * 4 and found["changed"].tensor.blob.size == 5 * 9000 * 4
    assert sum(len(data) for data in outbox.blobs.values()) == (8998 + 5 * 9000) * 4, "and nothing else left the worker"
    outbox.blobs.clear()
    del outbox.uploads["kept/0/0"]


def test_a_shared_tensor_that_is_changed_in_place_comes_back(bench: Bench) -> None:
    rans = bench.engine.run(
        Block([5, 6, 7], "total += 1\nseen = untouched + 0"),
        shared={"total": torch.zeros(3), "untouched": torch.ones(2)},
    )
    assert rans[0].failure is None and torch.equal(rans[0].saved["total"], torch.ones(3))
    assert "untouched" not in rans[0].saved


def test_what_the_session_keeps_always_comes_back(bench: Bench) -> None:
    """Also where nothing changed it, under its name, so that the session knows where in the table it is."""
    trace = bench.engine.trace(
        [Block([], "rows.append(1)", captured={})], {"rows": [], "total": torch.zeros(3), "count": 4}
    )
    for entry, name in enumerate(("rows", "total")):
        trace.variables.add(id=name, entry=entry)
    trace.stream = True
    [ran] = bench.engine.run_traces([[Block([5, 6, 7])]], captured=trace)
    saves = saves_of(ran)[-1]
    assert [binding.name for binding in saves.names] == ["rows", "total"] and [one.index for one in saves.updates] == [
        0
    ]
    assert saves.objects.values[saves.names[0].value.ref] == saves.updates[0].value
    assert not any(increment.captured for increment in ran.increments), "a stream's increments leave it to the end"
