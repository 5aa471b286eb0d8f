"""Over two tensor-parallel ranks, the streams of layers that return a stale residual beside it: every view, read and changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor.block.fiber import Fiber  # noqa: F401 - before transformers makes a model, see there
from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import Block
from tests.engine.spread import SpreadEngine
from tests.engine.views.test_views import (
    BESIDE,
    CHANGES,
    PROMPTS,
    READ_ONLY,
    SHAPE,
    SHARED,
    STEPS,
    TOLERANCE,
    Views,
    check_everything,
    place,
    ramp,
    read_everything,
)
from tests.oracle import Edit, difference

# What ranks hold parts of until the sum of attention and MLP is reduced.
PARTIAL = {"cohere": ("attn_out", "mlp_out")}


@pytest.fixture(scope="module", params=["cohere", "stablelm"])
def views(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Views]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param, SHAPE)
    engine = SpreadEngine(checkpoint, 2, 1, step_seconds=60.0, dtype="float32")
    views = Views(checkpoint, request.param, engine)
    views.paths = [path for path in views.paths if not path.endswith(PARTIAL.get(views.arch, ()))]
    yield views
    assert engine.worker.idle, "a trace left something behind"
    engine.close()


def test_every_view_in_prefill_and_decode(views: Views) -> None:
    source = read_everything(views.paths, STEPS)
    traces = [[Block(prompt, source, {"max_tokens": STEPS, "ignore_eos": True})] for prompt in PROMPTS[:2]]
    for prompt, ran in zip(PROMPTS[:2], views.engine.run_traces(traces, plain=(BESIDE[0],)), strict=False):
        assert ran.failure is None, ran.failure
        check_everything(views, prompt, ran.saved["values"], ran.token_ids)


def test_a_change_anywhere_does_what_it_does_in_transformers(views: Views) -> None:
    """All at the same time, each in a trace of its own."""
    statement, _ = CHANGES["assigned"]
    fixed = (*READ_ONLY, *SHARED.get(views.arch, ()))
    paths = [path for path in views.paths if path != "logits" and not path.endswith(fixed)]
    paths = [path for path in paths if not path.startswith("blocks.0.")]
    line = "for step in tracer.iter[:]:\n    {}\n    logits.append(model.logits.output.save())\n"
    sources = ["logits = []\n" + line.format(statement.format(at=place(path))) for path in paths]
    sampling = {"max_tokens": 3, "ignore_eos": True}
    rans = views.engine.run_traces([[Block(PROMPTS[0], source, sampling)] for source in sources])
    for path, ran in zip(paths, rans, strict=True):
        assert ran.failure is None, (path, ran.failure)
        truth = views.oracle.run(PROMPTS[0], 3, [Edit(path, "output", ramp)])
        assert ran.token_ids == truth.tokens, path
        for step, logits in enumerate(ran.saved["logits"]):
            error = difference(logits, truth.logits[step])
            assert error <= TOLERANCE, f"{path} changed: logits of step {step} are off by {error}"


def test_a_part_of_a_sum_is_refused(views: Views) -> None:
    for name in PARTIAL.get(views.arch, ()):
        [ran] = views.engine.run(Block([5, 6], f"x = model.blocks[1].{name}.save()"))
        assert ran.failure is not None
        assert "could not be established" in ran.failure.message


def test_a_stream_between_parallel_halves_is_refused(views: Views) -> None:
    [ran] = views.engine.run(Block([5, 6], "x = model.blocks[1].resid_mid.save()"))
    assert (ran.failure is not None) == (views.arch == "cohere")
    if ran.failure is not None:
        assert "attention and MLP in parallel" in ran.failure.message
