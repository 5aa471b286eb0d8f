"""Several traces in one step, some of them sandboxed: each has the values that it has alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from executor.core.programs import made, units_of
from executor.core.request import Batch, InvokeRequest, Opened, Span
from executor.sandbox.pool import Pool
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb
from interpose.wire.encoder import Encoder
from tests.unit.executor.sandbox.parts import MODEL, ROWS, WIDTH, BlockRun, Worker, pool, program_of

STEPS = 3
SOURCES = {
    "reads": "kept = []\nfor step in tracer.iter[:]:\n    kept.append(model.layers[0].output[0].clone())\nkept.save()",
    "changes": "for step in tracer.iter[:]:\n    model.layers[0].output[0][:] *= 2",
    "replaces": "for step in tracer.iter[:]:\n    model.layers[0].linear.output = model.layers[0].linear.output + 1",
    "replaces the pair": "for step in tracer.iter[:]:\n    layer = model.layers[0]\n    layer.output = layer.output[0] - 3, None",
    "looks at another layer": "for step in tracer.iter[:]:\n    model.layers[1].output[0][:, 0] = 5",
    "fails in the second step": "for step in tracer.iter[:]:\n    h = model.layers[0].output\n    1 / (1 - step)",
    "assigns what does not fit": "for step in tracer.iter[:]:\n    model.layers[0].linear.output = torch.zeros(1, 2)",
    "ends its process": "import os\nh = model.layers[0].output\nos._exit(3)",
}


@pytest.fixture(scope="module")
def several() -> Iterator[Pool]:
    made_here = pool(4)
    yield made_here
    made_here.close()


def together(worker: Worker, sources: Sequence[tuple[str, bool]]) -> list[BlockRun]:
    """Run blocks in the same steps; each source comes with whether its tenant is trusted."""
    runs, interleaver = [BlockRun() for _ in sources], worker.interleaver
    for number, (source, trusted) in enumerate(sources):
        encoder = Encoder(inline_bytes=1 << 10, put_blob=worker._upload)
        trace = pb.Trace(id=f"t{number}", stacks=True)
        trace.invokes.add(program=program_of(source, {}, encoder))
        codes = {unit.key: made(unit, 1 << 20) for unit in units_of(trace)}
        interleaver.open(Opened(trace, "", codes, trusted))
        interleaver.admit(f"t{number}-0", InvokeRequest(trace.id, 0), ROWS, 0)
    for step in range(STEPS):
        rows = ROWS if step == 0 else 1
        # Each request has the rows that it has alone.
        hidden = (torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH) + step).repeat(len(sources), 1)
        keys = [f"t{number}-0" for number in range(len(sources))]
        spans = {
            key: Span(number, number * rows, (number + 1) * rows)
            for number, key in enumerate(keys)
            if interleaver.waits(key)
        }
        with torch.inference_mode():
            if spans:
                if interleaver.announces:
                    interleaver.announce(spans)
                interleaver.begin_step(Batch(spans, hidden.shape[0], hidden.shape[0], len(sources)))
            made_here = MODEL(hidden)
            if spans:
                interleaver.end_forward()
                interleaver.end_step()
        for key, ended in interleaver.take_ended().items():
            runs[keys.index(key)].ended = ended
        for run, part in zip(runs, made_here.split(rows), strict=True):
            run.outputs.append(part.clone())
    for number, run in enumerate(runs):
        _, events, _ = interleaver.finish(f"t{number}", 0, Result("said", [1] * STEPS))
        worker._read(run, f"t{number}", [pb.Event.FromString(event) for event in events])
    assert interleaver.idle
    return runs


def said(run: BlockRun) -> tuple[object, ...]:
    """Return how a run ended, without the id of its trace."""
    failure = run.failure
    return run.ended, None if failure is None else (failure.code, failure.message, failure.location)


def numbers(run: BlockRun) -> list[float]:
    """Return what a run saved, and what the model made of its rows."""
    found = [*itertools.chain(*run.saved.values()), *run.outputs]
    return torch.cat([one.flatten() for one in found]).tolist()


def same(one: BlockRun, other: BlockRun) -> bool:
    """Return whether two runs came to the same."""
    return said(one) == said(other) and numbers(one) == pytest.approx(numbers(other), abs=1e-5)


def test_each_of_several_traces_has_what_it_has_alone(several: Pool) -> None:
    worker = Worker(several)
    alone = {name: together(worker, [(source, False)])[0] for name, source in SOURCES.items()}
    for name, source in SOURCES.items():
        assert "exit" in source or same(alone[name], together(worker, [(source, True)])[0]), name
    names = list(SOURCES)
    for number, first in enumerate(names):
        second, third = names[(number + 1) % len(names)], names[(number + 3) % len(names)]
        trusted = bool(number % 2) and "exit" not in SOURCES[second]
        runs = together(worker, [(SOURCES[first], False), (SOURCES[second], trusted), (SOURCES[third], False)])
        for name, run in zip((first, second, third), runs, strict=True):
            assert same(run, alone[name]), (first, second, third, trusted, name)
