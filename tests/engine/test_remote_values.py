"""A tensor that an earlier trace saved is bound in a block by reference, with what indices leave of it."""

from __future__ import annotations

import numpy as np
import torch

from interpose import indexing
from interpose.v1.value_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT32, RemoteTensor, TensorView, Value
from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block, close


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
