"""`module.skip(value)`: what comes out is what transformers computes with the module's output replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.core.ended import Ended
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block, check_failed
from tests.oracle import Edit, difference

PROMPT = [5, 400, 17, 99, 256, 31, 8]
OTHERS = [[3, 77], [12, 250, 33, 8, 441]]
LONG = {"max_tokens": 4, "ignore_eos": True}
TOLERANCE = 1e-4


def attention(bench: Bench, layer: int) -> str:
    return bench.block(layer) + (".attn" if bench.arch == "gpt2" else ".self_attn")


def run_beside(bench: Bench, source: str, sampling: dict[str, Any] = LONG) -> Any:
    """Run a block beside a traced and a plain request, neither of which may notice."""
    at = expression(bench.block(1) + ".mlp")
    beside = Block(OTHERS[0], f"own = {at}.output.save()\nl = model.logits.output.save()")
    other, ran, plain = bench.engine.run_traces([[beside], [Block(PROMPT, source, sampling)]], plain=(OTHERS[1],))
    truth = bench.oracle.run(OTHERS[0])
    assert difference(other.saved["own"], truth.value(bench.block(1) + ".mlp")) <= TOLERANCE
    assert difference(other.saved["l"], truth.logits[0]) <= TOLERANCE
    assert plain.token_ids == bench.engine.plain(OTHERS[1]).token_ids
    return ran


def check_logits(bench: Bench, ran: Any, edit: Edit) -> None:
    assert ran.failure is None, ran.failure
    truth = bench.oracle.run(PROMPT, 4, [edit])
    assert ran.token_ids == truth.tokens
    for step, logits in enumerate(ran.saved["logits"]):
        assert difference(logits, truth.logits[step]) <= TOLERANCE
    assert difference(truth.logits[0], bench.oracle.run(PROMPT).logits[0]) > 1e-3, "the skip must show"


@pytest.mark.parametrize("part", ["mlp", "attention"])
def test_a_skipped_module_gives_the_value(bench: Bench, part: str) -> None:
    path = bench.block(1) + ".mlp" if part == "mlp" else attention(bench, 1)
    at = expression(path)
    before = expression(bench.block(0)) + ".output" + ("" if bench.arch == "gpt2" else "[0]")
    source = (
        f"logits = []\nfor step in tracer.iter[:]:\n    x = {before}\n    {at}.skip(torch.full_like(x, 0.25))\n"
        "    logits.append(model.logits.output.save())\n"
    )
    check_logits(bench, run_beside(bench, source), Edit(path, "output", lambda value: value * 0 + 0.25))


def test_a_skipped_layer_hands_its_input_on(bench: Bench) -> None:
    path = bench.block(2)
    at = expression(path)
    passed = f"{at}.input" if bench.arch == "gpt2" else f"tuple({at}.inputs[0][1:3])"
    source = (
        f"logits = []\nfor step in tracer.iter[:]:\n    {at}.skip({passed})\n"
        "    logits.append(model.logits.output.save())\n"
    )
    truth = bench.oracle.run(PROMPT, 4)
    values: list[Any] = []

    def keep(value: Any) -> Any:
        values.append(value)
        return value

    edits = [Edit(bench.block(1), "output", keep), Edit(path, "output", lambda value: values[-1])]
    ran = run_beside(bench, source)
    assert ran.failure is None, ran.failure
    edited = bench.oracle.run(PROMPT, 4, edits)
    assert difference(truth.logits[0], edited.logits[0]) > 1e-3
    assert ran.token_ids == edited.tokens
    for step, logits in enumerate(ran.saved["logits"]):
        assert difference(logits, edited.logits[step]) <= TOLERANCE


def test_a_module_without_attention_is_skipped_in_one_step_alone(bench: Bench) -> None:
    path = bench.block(1) + ".mlp"
    source = (
        f"logits = []\nfor step in tracer.iter[:]:\n    if step == 1:\n        {expression(path)}.skip(torch.zeros(1, W))\n"
        "        out = (" + expression(path) + ".output == 0).all().item()\n        out.save()\n"
        "    logits.append(model.logits.output.save())\n"
    ).replace("W", str(bench.oracle.config.hidden_size))
    ran = run_beside(bench, source)
    assert ran.failure is None, ran.failure
    truth = bench.oracle.run(PROMPT, 4, [Edit(path, "output", lambda value: value * 0, steps={1})])
    for step, logits in enumerate(ran.saved["logits"]):
        assert difference(logits, truth.logits[step]) <= TOLERANCE


def test_attention_skipped_in_the_last_step_only_is_right(bench: Bench) -> None:
    """Nothing reads the cache afterwards, be it the only step or the last of several."""
    path = attention(bench, 1)
    skip = f"{expression(path)}.skip(torch.zeros(ROWS, {bench.oracle.config.hidden_size}))\n"
    only = skip.replace("ROWS", str(len(PROMPT))) + "logits = model.logits.output.save()"
    ran = run_beside(bench, only, {"max_tokens": 1})
    assert ran.failure is None, ran.failure
    zero = Edit(path, "output", lambda value: value * 0)
    assert difference(ran.saved["logits"], bench.oracle.run(PROMPT, 1, [zero]).logits[0]) <= TOLERANCE
    last = f"for step in tracer.iter[3]:\n    {skip.replace('ROWS', '1')}    logits = model.logits.output.save()"
    ran = run_beside(bench, last)
    assert ran.failure is None, ran.failure
    zero = Edit(path, "output", lambda value: value * 0, steps={3})
    assert difference(ran.saved["logits"], bench.oracle.run(PROMPT, 4, [zero]).logits[3]) <= TOLERANCE


@pytest.mark.parametrize(
    "rest",
    ["", "r = tracer.result", "for step in tracer.iter[1:]:\n    x = model.logits.output", "tracer.iter", "CAUGHT"],
)
def test_attention_that_runs_after_it_was_skipped_is_refused(bench: Bench, rest: str) -> None:
    at = expression(attention(bench, 1))
    source = f"{at}.skip(torch.zeros({len(PROMPT)}, {bench.oracle.config.hidden_size}))\n"
    if rest == "CAUGHT":
        rest = (
            "for step in tracer.iter[1:]:\n    try:\n        x = model.logits.next().output\n"
            "    except Exception:\n        x = 1\n"
        )
    ran = run_beside(bench, source + rest)
    assert ran.failure is not None
    assert ran.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert "was skipped from step 0 on and was then to run" in ran.failure.message
    assert len(ran.token_ids) == 2, "the request ends in the step that would be wrong"


def test_a_request_that_stops_after_a_skip_is_fine(bench: Bench) -> None:
    at = expression(attention(bench, 1))
    source = (
        f"{at}.skip(torch.zeros({len(PROMPT)}, {bench.oracle.config.hidden_size}))\nmodel.logits.output\ntracer.stop()"
    )
    ran = run_beside(bench, source)
    assert ran.failure is None, ran.failure
    assert ran.state is Ended.STOPPED


REFUSALS = [
    (
        "{block}.skip(torch.zeros(7, W))\nx = {block}.mlp.output",
        pb.ERROR_CODE_OUT_OF_ORDER,
        2,
        "which the block skipped",
    ),
    ("x = {block}.mlp.output\n{block}.skip(torch.zeros(7, W))", pb.ERROR_CODE_OUT_OF_ORDER, 2, "had already begun"),
    ("x = {block}.mlp.output\n{block}.mlp.skip(x)", pb.ERROR_CODE_OUT_OF_ORDER, 2, "had already begun"),
    ("x = 1\n{block}.mlp.skip(torch.zeros(3, W))", pb.ERROR_CODE_INVALID_ARGUMENT, 2, "has shape [7, W]"),
    ("x = 1\n{block}.mlp.skip(None)", pb.ERROR_CODE_INVALID_ARGUMENT, 2, "assigned a NoneType"),
    ("x = 1\nmodel.lm_head.skip(torch.zeros(1, 500))", pb.ERROR_CODE_UNKNOWN_LOCATION, 2, "model.logits.output"),
    ("x = 1\nmodel.logits.skip(torch.zeros(1, 500))", pb.ERROR_CODE_INVALID_ARGUMENT, 2, "logits.output = value"),
    ("x = 1\n{block}.mlp.skip()", pb.ERROR_CODE_INTERVENTION, 2, "TypeError"),
]


@pytest.mark.parametrize("case", range(len(REFUSALS)))
def test_refusals_name_the_users_line(bench: Bench, case: int) -> None:
    source, code, line, message = REFUSALS[case]
    width = str(bench.oracle.config.hidden_size)
    source = source.format(block=expression(bench.block(1))).replace("W", width)
    if bench.arch == "llama" and case == 0:
        source = source.replace(f"torch.zeros(7, {width})", f"(torch.zeros(7, {width}), torch.zeros(7, {width}))")
    ran = run_beside(bench, source, {"max_tokens": 1})
    check_failed(ran, code, message.replace("W", width), line)


def test_a_skipped_value_is_the_blocks_own(bench: Bench) -> None:
    """The tensor given to skip is copied into the model; changing it afterwards changes nothing."""
    path = bench.block(1) + ".mlp"
    source = (
        f"v = torch.zeros({len(PROMPT)}, {bench.oracle.config.hidden_size})\n{expression(path)}.skip(v)\n"
        "logits = model.logits.output.save()\nv += 1\nzero = model.samples.output\nv.save()"
    )
    ran = run_beside(bench, source, {"max_tokens": 1})
    truth = bench.oracle.run(PROMPT, 1, [Edit(path, "output", lambda value: value * 0)])
    assert difference(ran.saved["logits"], truth.logits[0]) <= TOLERANCE
    assert torch.equal(ran.saved["v"], torch.ones_like(ran.saved["v"]))
