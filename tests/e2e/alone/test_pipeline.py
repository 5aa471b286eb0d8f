"""A model over two pipeline stages, served: blocks, saves, streams and refusals as with one, through Ray and gRPC. Beside it, in
the same application, one with a layout of its own, which has no engine until somebody asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import interpose
from interpose.contract.errors import Unavailable
from interpose.v1 import trace_pb2 as pb
from tests.e2e.service import RunningService
from tests.e2e.test_fidelity import (
    EDITS,
    PROMPTS,
    Served,
    check_edit,
    check_everything,
    check_patch,
    read_everything,
)
from tests.oracle import Edit, Oracle, difference

PROMPT = [5, 400, 17, 99, 256, 31, 8]
STEPS = 3
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def staged(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    llama = {
        "name": "llama",
        "model": str(checkpoints["llama"]),
        "pipeline_parallel_size": 2,
        "engine": {"dtype": "float32", "enforce_eager": True},
        "limits": {"step_seconds": 6.0, "inline_bytes": 1024},
    }
    gpt2 = {
        "name": "gpt2",
        "model": str(checkpoints["gpt2"]),
        "engine": {"dtype": "float32", "enforce_eager": True},
        "autoscaling_config": {"min_replicas": 0, "max_replicas": 1},
    }
    settings: dict[str, object] = {"models": [llama, gpt2], "sessions": {"warm": 1}}
    running = RunningService(tmp_path_factory.mktemp("staged"), settings).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture
def model(staged: RunningService) -> Iterator[Any]:
    with interpose.connect(staged.address, progress=False) as client:
        model = client.model("llama")
        assert model._description.pipeline_parallel_size == 2
        yield model


def test_a_model_that_nobody_uses_has_no_engine(staged: RunningService) -> None:
    assert staged.state("gpt2") == "IDLE"
    with interpose.connect(staged.address, progress=False) as client:
        with pytest.raises(Unavailable, match="nobody has used gpt2 for a while") as caught:
            client.model("gpt2")
    assert caught.value.retry_after > 0


def test_an_early_layer_is_read_and_a_late_one_written(model: Any, checkpoints: dict[str, Path]) -> None:
    oracle = Oracle(checkpoints["llama"])
    layers = model.model.layers
    logits, early = [], []
    with model.trace(temperature=0.0, max_tokens=STEPS, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPT):
            for _step in tracer.iter[:]:
                h = layers[0].mlp.output
                early.append(h.save())
                layers[3].mlp.output = h * 2
                logits.append(model.logits.output.save())
            result = tracer.result.save()
        with tracer.invoke([3, 77], max_tokens=1):
            beside = layers[3].output[0].save()
    kept: list[Any] = []

    def keep(value: Any) -> Any:
        kept.append(value.clone())
        return value

    edits = [
        Edit("model.layers.0.mlp", "output", keep),
        Edit("model.layers.3.mlp", "output", lambda value: kept[-1] * 2),
    ]
    truth = oracle.run(PROMPT, STEPS, edits)
    assert result.token_ids == truth.tokens
    for value, expected in zip(logits, truth.logits, strict=True):
        assert difference(value, expected) <= TOLERANCE
    for value, expected in zip(early, kept, strict=True):
        assert difference(value, expected) <= TOLERANCE
    assert difference(truth.logits[0], oracle.run(PROMPT).logits[0]) > 1e-3, "the change must show"
    assert difference(beside, oracle.run([3, 77]).value("model.layers.3")[0]) <= TOLERANCE


def test_saves_of_both_stages_come_once(staged: RunningService, model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One of the ranks sends what all of them have, blobs and prints, whichever stage had the value."""
    with model.trace(PROMPT) as tracer:
        first = model.model.layers[0].output[0].save()
        last = model.model.layers[3].output[0].save()
        print("said once")
    assert capsys.readouterr().out.count("said once") == 1
    stored = sum(tenant.stored_bytes for tenant in staged.status().tenants)
    assert stored < 1.5 * (first.nbytes + last.nbytes), "a value is held twice"
    assert first.shape == last.shape == (len(PROMPT), 128)
    assert tracer.accounting.steps == 1
    assert tracer.accounting.served == {"model.layers.0.output": 1, "model.layers.3.output": 1}


def test_a_stream_has_what_each_step_saved(model: Any, checkpoints: dict[str, Path]) -> None:
    truth = Oracle(checkpoints["llama"]).run(PROMPT, STEPS)
    with model.trace(PROMPT, max_tokens=STEPS, temperature=0.0, ignore_eos=True, stream=True) as tracer:
        rows = [].save()
        for _step in tracer.iter[:]:
            rows.append(model.model.layers[1].mlp.output[-1].save())
    lengths = [len(out.saves["rows"]) for out in tracer.stream() if "rows" in out.saves]
    assert lengths[-1] == STEPS and lengths == sorted(lengths)
    for step, row in enumerate(rows):
        assert difference(row, truth.value("model.layers.1.mlp", step=step)[-1]) <= TOLERANCE


def test_an_error_on_one_stage_is_the_users_own(model: Any) -> None:
    with pytest.raises(interpose.InterventionError, match="ZeroDivisionError"):
        with model.trace(PROMPT):
            model.model.layers[3].output[0].save()
            1 / 0
    with model.trace(PROMPT, temperature=0.0):
        again = model.logits.output.save()
    assert torch.isfinite(again).all()


def test_a_scan_is_refused_with_what_to_write(model: Any) -> None:
    with pytest.raises(interpose.InvalidArgument, match="max_tokens=1") as error:
        with model.scan(PROMPT):
            model.model.layers[0].output[0].save()
    assert error.value.code == pb.ERROR_CODE_INVALID_ARGUMENT
    with pytest.raises(interpose.InvalidArgument, match="model.explain runs a model on one pipeline stage"):
        model.explain("for step in tracer.iter[:]:\n    model.logits.output\n")


def test_the_model_beside_it_has_an_engine_now_with_a_layout_of_its_own(
    staged: RunningService, checkpoints: dict[str, Path]
) -> None:
    staged.wait_until_running("gpt2")  # it was asked for by the first test
    with interpose.connect(staged.address, progress=False) as client:
        served = Served(client, "gpt2", checkpoints["gpt2"], Oracle(checkpoints["gpt2"]))
        assert served.model._description.pipeline_parallel_size == 1
        for prompt in PROMPTS:
            check_everything(served, prompt, *read_everything(served, prompt))
        for kind in EDITS:
            check_edit(served, kind)
        check_patch(served)
