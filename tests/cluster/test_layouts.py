"""Four ranks: over as many tensor-parallel ones there are fewer key/value heads than ranks; two by two, stages as well.

The tests of one rank that change values, in every kind of way, and apply modules; what is read, and changes of every canonical
value, `tests/fidelity` measures in these layouts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from executor.plugin.config import prepare_environment
from interpose.cli.demo_model import write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench
from tests.engine.fidelity.test_fidelity import (  # noqa: F401
    test_an_edit_does_what_the_same_edit_does_in_transformers,
    test_forced_samples_are_what_the_model_goes_on_with,
)
from tests.engine.harness import Block, check_failed
from tests.engine.model.test_apply import test_a_logit_lens_in_every_layer_and_step  # noqa: F401
from tests.engine.model.test_not_finite import LONG, SAMPLING, check_untouched
from tests.engine.parallel.test_pipeline import (  # noqa: F401
    test_a_block_reads_an_early_layer_and_writes_a_late_one,
    test_a_block_that_differs_between_the_ranks_fails_alone,
    test_a_changed_canonical_value,
    test_canonical_values_of_both_stages,
    test_random_numbers_of_torch_are_the_same_on_every_rank,
)
from tests.engine.spread import SpreadEngine


@pytest.fixture(scope="module", params=[(4, 1), (2, 2)], ids=["TP 4", "TP 2 x PP 2"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A llama with four query heads and two key/value heads."""
    tensor, pipeline = request.param
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    bench = Bench(checkpoint, "llama", SpreadEngine, tensor=tensor, pipeline=pipeline, step_seconds=60.0)
    yield bench
    assert bench.engine.interleaver.idle, "a trace left something behind"
    bench.engine.close()


def test_parts_whose_numbers_lie_close_together_are_not_taken_for_one_that_was_rounded(bench: Bench) -> None:
    source = (
        "gates = model.model.layers[0].mlp.gate_up_proj.output[0]\n"
        "gates[:] = 1 + 0.0005 * torch.linspace(0, 1, gates.shape[-1])\nmodel.model.layers[0].mlp.act_fn.output.save()"
    )
    [ran] = bench.engine.run(Block(LONG, source, SAMPLING))
    check_failed(ran, pb.ERROR_CODE_UNKNOWN_LOCATION, "is split over the tensor-parallel ranks", None)


@pytest.mark.parametrize("column", [0, -1])
def test_what_lies_on_one_rank_and_torch_does_not_count_is_a_change_on_all(bench: Bench, column: int) -> None:
    """A reader that took it for none would leave it in its part of the cache."""
    source = f"model.model.layers[0].mlp.down_proj.input.data[:, {column}] = float('nan')"
    [spoilt] = bench.engine.run(Block(LONG, source, SAMPLING))
    check_failed(spoilt, pb.ERROR_CODE_INTERVENTION, "torch.nan_to_num", None)
    check_untouched(bench)


@pytest.mark.parametrize(
    ("cores", "workers", "binding"),
    [({0, 1}, 2, "0|1"), ({3, 1, 2, 0}, 2, "0,1|2,3"), ({0, 1, 2}, 2, "0|1"), ({4, 5}, 4, "4|5|4|5")],
)
def test_each_rank_has_cores_of_its_own_or_shares_one(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], workers: int, binding: str
) -> None:
    name = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setenv(name, "")  # so that what is set is taken back
    monkeypatch.delenv(name)
    prepare_environment(workers)
    assert os.environ[name] == binding
