"""A large tensor that a session uploads is decoded once; each trace has it as its own."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from interpose.cli.demo_model import write_demo_model
from interpose.v1.value_pb2 import ARRAY_LIBRARY_TORCH, DTYPE_FLOAT32, Blob, Tensor, Value
from tests.engine.harness import Block, LocalEngine, Ran

HIDDEN, FEATURES = 128, 256
READS = "seen = (W.sum(0), W[3].clone()).save()\n"
AUTOENCODER = """\
import torch
kept = [].save()
for step in tracer.iter[:]:
    h = model.model.layers[1].output[0]
    features = torch.relu(h @ W)
    kept.append(features.topk(3).values)
    h[:] += 0.1 * (features @ W.T - h)
"""


class Counting(dict):
    """Uploads that count how often each is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: Counter[str] = Counter()

    def __getitem__(self, key: str) -> bytes:
        self.fetched[key] += 1
        data: bytes = super().__getitem__(key)
        return data


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    made = LocalEngine(checkpoint, graphs=True, dtype="float32", max_num_seqs=8)
    made.worker.interpose_outbox.uploads = Counting()
    yield made
    assert made.interleaver.idle, "a trace left something behind"
    made.close()


def uploaded(engine: LocalEngine, value: torch.Tensor) -> Value:  # any shape
    data = value.numpy().tobytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    dict.__setitem__(engine.worker.interpose_outbox.uploads, digest, data)
    blob = Blob(id=digest, size=len(data))
    return Value(tensor=Tensor(dtype=DTYPE_FLOAT32, shape=value.shape, library=ARRAY_LIBRARY_TORCH, blob=blob))


def weights(seed: int) -> torch.Tensor:  # [HIDDEN, FEATURES]
    return torch.randn(HIDDEN, FEATURES, generator=torch.Generator().manual_seed(seed)) / 10


def seen(ran: Ran, value: torch.Tensor) -> bool:  # [HIDDEN, FEATURES]
    assert ran.failure is None, ran.failure
    total, row = ran.saved["seen"]
    return torch.equal(total, value.sum(0)) and torch.equal(row, value[3])


@pytest.mark.parametrize("write", ["W += 1", "W[:] = 0", "W.numpy()[:] = 2", "W.data[0] = 5", "W.mul_(0)"])
def test_a_trace_changes_what_it_has_and_no_other_trace_sees_it(engine: LocalEngine, write: str) -> None:
    value = weights(len(write))
    captured = {"W": uploaded(engine, value)}
    changes = Block([5, 6, 7], f"{READS}{write}\nafter = W.save()", captured=captured)
    reads = Block([5, 6, 7], READS, captured=captured)
    one, two, three = engine.run_traces([[changes], [reads], [changes]])
    assert seen(one, value) and seen(two, value) and seen(three, value)
    assert torch.equal(one.saved["after"], three.saved["after"]) and not torch.equal(one.saved["after"], value)
    [four] = engine.run(reads)
    assert seen(four, value)
    fetched = engine.worker.interpose_outbox.uploads.fetched
    assert fetched[captured["W"].tensor.blob.id] == 1


def test_programs_share_the_tensor_with_the_traces_and_notice_a_change(engine: LocalEngine) -> None:
    value = weights(99)
    captured = {"W": uploaded(engine, value)}
    sampling = {"max_tokens": 8, "ignore_eos": True}
    plain = Block([5, 6, 7], f"pass\n{AUTOENCODER}", sampling, captured)
    scaled = Block([5, 6, 7], f"W *= 2\n{AUTOENCODER}", sampling, captured)
    inline = Block([5, 6, 7], f"pass\n{AUTOENCODER}", sampling, {"W": value})
    double = Block([5, 6, 7], f"pass\n{AUTOENCODER}", sampling, {"W": value * 2})
    rans = engine.run_traces([[one] for one in (inline, double)])
    programs = engine.interleaver.loops._programs.made
    rans += engine.run_traces([[one] for one in (plain, scaled, plain)])
    rans += engine.run_traces([[scaled], [plain]])
    expected = [rans[0], rans[1], rans[0], rans[1], rans[0], rans[1], rans[0]]
    for ran, like in zip(rans, expected, strict=True):
        assert ran.failure is None, ran.failure
        assert len(ran.saved["kept"]) == 8
        for mine, theirs in zip(ran.saved["kept"], like.saved["kept"], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert engine.interleaver.loops._programs.made == programs, "equal weights are one program"
    assert engine.worker.interpose_outbox.uploads.fetched[captured["W"].tensor.blob.id] == 1
