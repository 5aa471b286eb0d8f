"""Over two pipeline stages everything is as on one rank: the tests of one rank, and what only several stages can get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from interpose.cli.demo_model import write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench
from tests.engine.harness import Block
from tests.engine.spread import SpreadEngine
from tests.engine.test_accounting import test_locations_are_counted_over_the_steps  # noqa: F401
from tests.engine.test_apply import (  # noqa: F401
    test_a_logit_lens_in_every_layer_and_step,
    test_a_module_makes_of_its_inputs_what_the_forward_pass_makes_of_them,
    test_an_embedding,
    test_any_number_of_rows_and_dimensions,
    test_wherever_the_block_is,
)
from tests.engine.test_barrier import (  # noqa: F401
    test_a_barrier_in_every_step_and_others_beside_it,
    test_exchanging_at_the_same_module,
)
from tests.engine.test_cache import (  # noqa: F401
    test_all_modules_in_every_step,
    test_named_modules_of_each_prompt_after_their_changes,
)
from tests.engine.test_edits import test_the_block_sees_what_the_edits_made  # noqa: F401
from tests.engine.test_fidelity import (  # noqa: F401
    test_a_value_from_another_invoke_patches_this_one,
    test_an_edit_does_what_the_same_edit_does_in_transformers,
    test_eight_at_once_each_gets_its_own,
    test_every_location_in_prefill_and_decode,
    test_forced_samples_are_what_the_model_goes_on_with,
)
from tests.engine.test_skip import (  # noqa: F401
    test_a_skipped_layer_hands_its_input_on,
    test_a_skipped_module_gives_the_value,
    test_attention_that_runs_after_it_was_skipped_is_refused,
)
from tests.engine.test_stopping import test_a_block_ends_its_request_at_once_whatever_the_sampling_says  # noqa: F401
from tests.engine.test_whole import (  # noqa: F401
    test_reads_the_rows_of_all_in_the_order_of_the_invokes,
    test_writes_reach_every_prompt_of_the_trace_and_nobody_else,
)
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
    ("model.model.layers[3].mlp.output\nwhile True: pass", pb.ERROR_CODE_DEADLINE_EXCEEDED, 2, "longer than"),
    (
        "import torch.distributed as d\nmodel.model.layers[2 * d.get_rank()].output",
        pb.ERROR_CODE_INTERVENTION,
        None,
        "went different ways on the model's 2 ranks",
    ),
]


@pytest.mark.parametrize("case", range(len(FAILURES)))
def test_a_block_fails_alone_and_at_its_own_line(bench: Bench, case: int) -> None:
    source, code, line, message = FAILURES[case]
    beside = Block(OTHER, "h = model.model.layers[3].mlp.output.save()", LONG)
    good, bad, plain = bench.engine.run_traces([[beside], [Block(PROMPT, source, LONG)]], plain=(OTHER,))
    assert bad.failure is not None
    assert (bad.failure.code, message in bad.failure.message) == (code, True), bad.failure
    if line is not None:
        assert bad.failure.frames[-1].line == line
    truth = bench.oracle.run(OTHER, 4)
    assert good.failure is None and good.token_ids == plain.token_ids == truth.tokens
    assert difference(good.saved["h"], truth.value("model.layers.3.mlp")) <= TOLERANCE
    assert bench.engine.interleaver.idle


def test_a_trace_that_is_dropped_in_flight_leaves_nothing(bench: Bench) -> None:
    from vllm import SamplingParams

    from executor.work import Work

    engine = bench.engine.llm.llm_engine
    trace = bench.engine.trace([Block(PROMPT, "for s in tracer.iter[:]:\n    model.logits.output\n")], {})
    params = SamplingParams(max_tokens=50, ignore_eos=True, extra_args=Work(trace, 0, 1, "").to_args())
    engine.add_request("dropped", {"prompt_token_ids": PROMPT, "cache_salt": "x"}, params)
    for _ in range(4):
        engine.step()
    assert not bench.engine.interleaver.idle
    engine.abort_request(["dropped"])
    bench.engine.llm.collective_rpc("interpose_drop", args=(trace.id,))
    assert bench.engine.interleaver.idle
    truth = bench.oracle.run(PROMPT, 4).tokens
    assert list(bench.engine.plain(PROMPT, ignore_eos=True).token_ids) == truth
