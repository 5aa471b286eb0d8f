"""Over two pipeline stages everything is as on one rank: the tests of one rank, and what only several stages can get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from interpose.cli.demo_model import write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.engine.block.test_accounting import (  # noqa: F401
    test_locations_are_counted_over_the_steps,
    test_tokens_of_a_prompt_from_the_cache_are_counted,
)
from tests.engine.block.test_cache import (  # noqa: F401
    test_all_modules_in_every_step,
    test_named_modules_of_each_prompt_after_their_changes,
)
from tests.engine.conftest import Bench
from tests.engine.fidelity.test_fidelity import (  # noqa: F401
    test_a_value_from_another_invoke_patches_this_one,
    test_an_edit_does_what_the_same_edit_does_in_transformers,
    test_eight_at_once_each_gets_its_own,
    test_every_location_in_prefill_and_decode,
    test_forced_samples_are_what_the_model_goes_on_with,
)
from tests.engine.harness import Block, check_failed
from tests.engine.interleave.test_barrier import (  # noqa: F401
    test_a_barrier_in_every_step_and_others_beside_it,
    test_exchanging_at_the_same_module,
)
from tests.engine.interleave.test_edits import test_the_block_sees_what_the_edits_made  # noqa: F401
from tests.engine.interleave.test_stopping import test_a_block_ends_its_request_at_once_whatever_the_sampling_says  # noqa: F401
from tests.engine.interleave.test_whole import (  # noqa: F401
    test_reads_the_rows_of_all_in_the_order_of_the_invokes,
    test_writes_reach_every_prompt_of_the_trace_and_nobody_else,
)
from tests.engine.model.test_apply import (  # noqa: F401
    test_a_logit_lens_in_every_layer_and_step,
    test_a_module_makes_of_its_inputs_what_the_forward_pass_makes_of_them,
    test_an_embedding,
    test_any_number_of_rows_and_dimensions,
    test_wherever_the_block_is,
)
from tests.engine.model.test_not_finite import (  # noqa: F401
    test_a_block_that_sees_every_prompt_is_held_to_it_too,
    test_a_request_that_spoils_its_cache_fails_and_harms_nobody,
)
from tests.engine.model.test_parameters import (  # noqa: F401
    test_a_name_that_there_is_not,
    test_a_write_is_refused_and_reaches_nobody,
    test_every_weight_is_the_checkpoints,
    test_they_compute_with_the_values_of_the_model,
)
from tests.engine.model.test_skip import (  # noqa: F401
    test_a_skipped_layer_hands_its_input_on,
    test_a_skipped_module_gives_the_value,
    test_attention_that_runs_after_it_was_skipped_is_refused,
)
from tests.engine.spread import SpreadEngine
from tests.oracle import Edit, difference

PROMPT = [5, 400, 17, 99, 256, 31, 8]
OTHER = [12, 250, 33, 8, 441]
LONG = {"max_tokens": 4, "ignore_eos": True}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A llama with layers 0 and 1 on one stage, 2 and 3 on the other."""
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    bench = Bench(checkpoint, "llama", SpreadEngine, tensor=1, pipeline=2)
    yield bench
    assert bench.engine.interleaver.idle, "a trace left something behind"
    bench.engine.close()


def test_a_block_reads_an_early_layer_and_writes_a_late_one(bench: Bench) -> None:
    """In every step, beside a traced and a plain request; what the late stage gave is there in the next step on the early one."""
    source = """\
    logits, seen = [], torch.zeros(())
    for step in tracer.iter[:]:
        model.model.layers[0].mlp.output[:] += seen
        early = model.model.layers[1].mlp.output
        model.model.layers[3].mlp.output = early * 2
        logits.append(model.logits.output.save())
        seen = logits[-1].mean()
    """
    beside = Block(OTHER, "h = model.model.layers[3].mlp.output.save()\nl = model.logits.output.save()", LONG)
    ran, other, plain = bench.engine.run_traces([[Block(PROMPT, source, LONG)], [beside]], plain=(OTHER,))
    assert ran.failure is None, ran.failure
    seen = [torch.zeros(())]
    early: list[Any] = []

    def keep(value: Any) -> Any:
        early.append(value)
        return value

    def note(value: Any) -> Any:
        seen.append(value.mean())
        return value

    edits = [
        Edit("model.layers.0.mlp", "output", lambda value: value + seen[-1]),
        Edit("model.layers.1.mlp", "output", keep),
        Edit("model.layers.3.mlp", "output", lambda value: early[-1] * 2),
        Edit("logits", "output", note),
    ]
    truth = bench.oracle.run(PROMPT, 4, edits)
    assert ran.token_ids == truth.tokens
    for found, expected in zip(ran.saved["logits"], truth.logits, strict=True):
        assert difference(found, expected) <= TOLERANCE
    untouched = bench.oracle.run(OTHER, 4)
    assert difference(truth.logits[0], bench.oracle.run(PROMPT).logits[0]) > 1e-3, "the change must show"
    assert difference(other.saved["h"], untouched.value("model.layers.3.mlp")) <= TOLERANCE
    assert difference(other.saved["l"], untouched.logits[0]) <= TOLERANCE
    assert other.token_ids == plain.token_ids == untouched.tokens


def test_canonical_values_of_both_stages(bench: Bench) -> None:
    names = [
        "embed.output",
        *(f"blocks[{i}].{name}" for i in range(4) for name in ("resid_pre", "attn.q", "attn.pattern", "attn.z", "resid_mid",
                                                                "mlp.act", "resid_post")),
        "final_norm.output",
        "unembed.output",
    ]  # fmt: skip
    lines = [f"    values.append(model.{name}.save())" for name in names]
    source = "\n".join(["values = []", "for step in tracer.iter[:2]:", *lines])
    [ran] = bench.engine.run(Block(PROMPT, source, {"max_tokens": 2, "ignore_eos": True}))
    assert ran.failure is None, ran.failure
    truth = bench.oracle.run(PROMPT, 2, canonical=True)
    for i, value in enumerate(ran.saved["values"]):
        step, name = divmod(i, len(names))
        path = names[name].replace("[", ".").replace("]", "")
        expected = truth.logits[step] if path == "unembed.output" else truth.value(path, step=step)
        assert difference(value, expected) <= TOLERANCE, (path, step)


@pytest.mark.parametrize(
    "path", ["blocks[1].resid_post", "blocks[2].attn.z", "blocks[3].mlp.act", "blocks[2].resid_mid"]
)
def test_a_changed_canonical_value(bench: Bench, path: str) -> None:
    source = f"model.{path} = model.{path} * 0.5 + 0.25\nlogits = model.logits.output.save()"
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    edit = Edit(path.replace("[", ".").replace("]", ""), "output", lambda value: value * 0.5 + 0.25)
    truth = bench.oracle.run(PROMPT, 1, [edit], canonical=True)
    assert difference(ran.saved["logits"], truth.logits[0]) <= TOLERANCE
    assert difference(truth.logits[0], bench.oracle.run(PROMPT).logits[0]) > 1e-3, "the change must show"


def test_what_an_applied_module_gives_is_the_blocks_own_on_every_stage(bench: Bench) -> None:
    """It may be changed in place, and gradients may go through it, wherever the module lies."""
    source = """\
    ones, made, slopes = torch.ones(2, 128), [].save(), [].save()
    for i in (0, 3):
        given = model.model.layers[i].mlp(ones)
        slope = torch.ones(128, requires_grad=True)
        with torch.enable_grad():
            (given * slope).sum().backward()
        slopes.append(slope.grad - given.sum(0))
        given += 1
        made.append(given - model.model.layers[i].mlp(ones))
    """
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    for made, slope in zip(ran.saved["made"], ran.saved["slopes"], strict=True):
        assert difference(made, torch.ones(2, 128)) <= TOLERANCE and difference(slope, torch.zeros(128)) <= TOLERANCE


FAILURES = [
    ("model.model.layers[3].output\n1 / 0", pb.ERROR_CODE_INTERVENTION, 2, "division by zero"),
    ("model.model.layers[0].output\n1 / 0", pb.ERROR_CODE_INTERVENTION, 2, "division by zero"),
    ("model.model.layers[3].output\nmodel.model.layers[0].output", pb.ERROR_CODE_OUT_OF_ORDER, 2, "already passed"),
    ("x = 1\nmodel.model.layers[3].mpl.output", pb.ERROR_CODE_UNKNOWN_LOCATION, 2, "did you mean mlp"),
    ("model.model.layers[3].mlp.output = torch.zeros(3)", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "has shape [7, 128]"),
    ("model.model.layers[0].mlp.output = torch.zeros(3)", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "has shape [7, 128]"),
    ("model.lm_head(torch.zeros(2, 9))", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "of shape [rows, 128]"),
    ("model.model.embed_tokens(torch.tensor([9999]))", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "ids from 0 to 499"),
    ("model.model.layers[3].self_attn(torch.zeros(1, 128))", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "holds attention"),
    ("x = torch.eye(3).to_sparse().save()", pb.ERROR_CODE_INVALID_ARGUMENT, None, "to_dense()"),
    ("model.model.layers[3].mlp.output\nwhile True: pass", pb.ERROR_CODE_DEADLINE_EXCEEDED, 2, "longer than"),
    (
        "import torch.distributed as d\nmodel.model.layers[2 * d.get_rank()].output",
        pb.ERROR_CODE_INTERVENTION,
        None,
        "went different ways on the model's 2 ranks",
    ),
]


_OTHERWISE = "import numpy, time, torch.distributed as d\nother = numpy.random.default_rng().normal()\n"
DIVERGING = {
    "the clock, added in place": "model.model.layers[1].mlp.output[:] += time.perf_counter_ns() % 1_000_003 / 1e6",
    "the clock, in the last bits": "model.model.layers[3].mlp.output[:] += time.perf_counter_ns() % 1_000_003 / 1e10",
    "the order of a set": (
        "h = model.model.layers[0].mlp.output\nfor name in {*'abcdefghijklmnopqrstuvwxyz'}:\n    h = h * 1.01 + ord(name)\n"
        "model.model.layers[0].mlp.output = h"
    ),
    "rows in the order of a set": (
        "rows = {c: torch.full((128,), float(ord(c))) for c in 'abcdefghijklmnopqrstuvwxyz'}\n"
        "model.model.layers[0].mlp.output = torch.stack([rows[c] for c in {*rows}][:7])"
    ),
    "random numbers, assigned": "model.model.layers[3].mlp.output = model.model.layers[3].mlp.output + other",
    "random numbers, in a later step": "for step in tracer.iter[2:3]:\n    model.model.layers[0].mlp.output[:] += other",
    "random numbers, where torch does not count": "model.model.layers[2].mlp.output.data[:] += other",
    "random numbers, in part of a projection": "model.model.layers[0].mlp.gate_up_proj.output[0][:, :3] += other",
    "random numbers, in place of a module": "model.model.layers[2].mlp.skip(torch.full((7, 128), other))",
    "random numbers, in logits": "model.logits.output[:, 5] = other",
    "the rank, as a token": "model.samples.output[:] = 5 + d.get_rank()",
    "random numbers, given to a module": "model.lm_head(torch.full((2, 128), other))",
    "another location, after a module": (
        "model.lm_head(torch.ones(2, 128))\nif d.get_rank() == 0:\n    model.model.layers[3].output\nmodel.logits.output"
    ),
    "another module, after a module": (
        "model.lm_head(torch.ones(2, 128))\nif d.get_rank() == 0:\n    model.lm_head(torch.ones(3, 128))\nmodel.logits.output"
    ),
    "the end, after a module": "model.lm_head(torch.ones(2, 128))\nif d.get_rank() == 0:\n    1 / 0\nmodel.logits.output",
    "an error on one": "model.model.layers[0].output\nif d.get_rank() == 0:\n    1 / 0\nmodel.model.layers[3].output",
}


@pytest.mark.parametrize("case", DIVERGING)
def test_a_block_that_differs_between_the_ranks_fails_alone(bench: Bench, case: str) -> None:
    """And at once: no later step is computed with what it wrote."""
    beside = Block(OTHER, "h = model.model.layers[3].mlp.output.save()", LONG)
    broken = Block(PROMPT, _OTHERWISE + DIVERGING[case], LONG)
    good, bad, plain = bench.engine.run_traces([[beside], [broken]], plain=(OTHER,))
    assert bad.failure is not None
    assert bad.failure.code == pb.ERROR_CODE_INTERVENTION, bad.failure
    assert "on the model's" in bad.failure.message or "division by zero" in bad.failure.message, bad.failure
    truth = bench.oracle.run(OTHER, 4)
    assert good.failure is None and good.token_ids == plain.token_ids == truth.tokens
    assert difference(good.saved["h"], truth.value("model.layers.3.mlp")) <= TOLERANCE
    assert bench.engine.interleaver.idle


def test_random_numbers_of_torch_are_the_same_on_every_rank(bench: Bench) -> None:
    """Also after sampling has drawn from the engine's generators."""
    source = """\
    torch.manual_seed(3)
    linear, drop = torch.nn.Linear(128, 128), torch.nn.Dropout(0.5)
    h = model.model.layers[0].mlp.output
    model.model.layers[0].mlp.output = linear(h)
    model.model.layers[3].mlp.output = drop(model.model.layers[3].mlp.output)
    logits = model.logits.output.save()
    """
    sampled = Block(OTHER, "x = 1", {"max_tokens": 3, "ignore_eos": True, "temperature": 1.0})
    _, first = bench.engine.run_traces([[sampled], [Block(PROMPT, source)]])
    [again] = bench.engine.run(Block(PROMPT, source))
    assert first.failure is None and again.failure is None, (first.failure, again.failure)
    assert difference(first.saved["logits"], again.saved["logits"]) <= TOLERANCE


@pytest.mark.parametrize("case", range(len(FAILURES)))
def test_a_block_fails_alone_and_at_its_own_line(bench: Bench, case: int) -> None:
    source, code, line, message = FAILURES[case]
    beside = Block(OTHER, "h = model.model.layers[3].mlp.output.save()", LONG)
    good, bad, plain = bench.engine.run_traces([[beside], [Block(PROMPT, source, LONG)]], plain=(OTHER,))
    check_failed(bad, code, message, line)
    truth = bench.oracle.run(OTHER, 4)
    assert good.failure is None and good.token_ids == plain.token_ids == truth.tokens
    assert difference(good.saved["h"], truth.value("model.layers.3.mlp")) <= TOLERANCE
    assert bench.engine.interleaver.idle


def test_a_trace_that_is_dropped_in_flight_leaves_nothing(bench: Bench) -> None:
    bench.engine.give_up(Block(PROMPT, "for s in tracer.iter[:]:\n    model.logits.output\n"), steps=4)
    assert bench.engine.interleaver.idle
    truth = bench.oracle.run(PROMPT, 4).tokens
    assert list(bench.engine.plain(PROMPT, ignore_eos=True).token_ids) == truth
