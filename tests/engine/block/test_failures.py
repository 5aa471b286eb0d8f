"""A block that fails is told why, at its own line, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench
from tests.engine.harness import Block, check_failed

PROMPT = [5, 400, 17, 99, 256]
OTHER = [8, 8, 1]


@pytest.fixture(autouse=True)
def others_unharmed(bench: Bench) -> Iterator[None]:
    """After each failure the engine's next requests are right."""
    expected = bench.oracle.run(OTHER, 4).tokens
    yield
    assert bench.engine.plain(OTHER, ignore_eos=True).token_ids == expected
    assert bench.engine.interleaver.idle


LAYER = "{block}"
# On a GPU it is torch's allocator that meets the limit of the address space, which is lowered while a block runs.
TOO_MUCH = (
    (pb.ERROR_CODE_INTERVENTION, 2, "OutOfMemoryError: CUDA out of memory")
    if torch.cuda.is_available()
    else (pb.ERROR_CODE_QUOTA_EXCEEDED, 2, "memory grow")
)
CASES = [
    ("x = 1\nraise ValueError('boom')", pb.ERROR_CODE_INTERVENTION, 2, "ValueError: boom"),
    ("def f():\n    return 1 / 0\nf()", pb.ERROR_CODE_INTERVENTION, 2, "ZeroDivisionError: division by zero"),
    ("x = undefined_name", pb.ERROR_CODE_INTERVENTION, 1, "NameError: name 'undefined_name' is not defined"),
    ("x = late_name", pb.ERROR_CODE_INTERVENTION, 1, "if it was saved there: late_name = ….save()"),
    ("raise SystemExit(3)", pb.ERROR_CODE_INTERVENTION, 1, "SystemExit: 3"),
    (LAYER + ".mpl.output", pb.ERROR_CODE_UNKNOWN_LOCATION, 1, "did you mean mlp"),
    ("x = 0\n{layers}[99].output", pb.ERROR_CODE_UNKNOWN_LOCATION, 2, "does not exist"),
    ("{layers}.output", pb.ERROR_CODE_UNKNOWN_LOCATION, 1, "not called"),
    ("model.lm_head.output", pb.ERROR_CODE_UNKNOWN_LOCATION, 1, "model.logits.output"),
    ("{layers}[2].output\n{layers}[1].output", pb.ERROR_CODE_OUT_OF_ORDER, 2, "already passed"),
    ("model.logits.output\n{layers}[1].output", pb.ERROR_CODE_OUT_OF_ORDER, 2, "already passed"),
    (LAYER + ".next().next().next().output", pb.ERROR_CODE_UNKNOWN_LOCATION, 1, "never reached"),
    ("for s in tracer.iter[7]:\n    pass", pb.ERROR_CODE_UNKNOWN_LOCATION, 1, "after 2 steps"),
    (LAYER + ".mlp.output = torch.zeros(3)", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "has shape [5,"),
    (LAYER + ".mlp.output = 4", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "assigned a int"),
    (LAYER + ".mlp.c = 4", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "cannot be assigned"),
    (LAYER + ".mlp(torch.zeros(3))", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "of shape [rows,"),
    (
        "model.samples.output[:] = 500",
        pb.ERROR_CODE_INVALID_ARGUMENT,
        None,
        "the token 500; the model has tokens from 0 to 499",
    ),
    ("model.samples.output = torch.tensor([[-1]])\ntracer.result", pb.ERROR_CODE_INVALID_ARGUMENT, 2, "the token -1"),
    ("tracer.barier(2)", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "tracer has no 'barier'"),
    ("x = object().save()", pb.ERROR_CODE_INVALID_ARGUMENT, None, "cannot be saved"),
    ("x = torch.eye(3).to_sparse().save()", pb.ERROR_CODE_INVALID_ARGUMENT, None, "to_dense()"),
    (
        "h = " + LAYER + ".output\nx = torch.eye(3).to_sparse().save()",
        pb.ERROR_CODE_INVALID_ARGUMENT,
        None,
        "to_dense()",
    ),
    (
        "x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).save()",
        pb.ERROR_CODE_INVALID_ARGUMENT,
        None,
        "not nested ones",
    ),
    ("with torch.autocast('cpu'):\n    model.logits.output", pb.ERROR_CODE_INVALID_ARGUMENT, 2, "torch mode"),
    ("tracer.result\n" + LAYER + ".output", pb.ERROR_CODE_UNKNOWN_LOCATION, 2, "tracer.result waits for the end"),
    ("tracer.result.outputs[0].text", pb.ERROR_CODE_INTERVENTION, 1, "the result is one sequence: result.text"),
    ("model.logits.save()", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "cannot be saved; write model.logits.output.save()"),
    ("x = [model.logits].save()", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "write model.logits.output"),
    ("x = [].save()\nx.append(model.logits)", pb.ERROR_CODE_INVALID_ARGUMENT, None, "write model.logits.output"),
    ("import interpose\ninterpose.save(" + LAYER + ")", pb.ERROR_CODE_INVALID_ARGUMENT, 2, "[1].output.save()"),
    ("x = model.logits * 2", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "computed with; write model.logits.output"),
    (
        "x = torch.softmax(model.logits, -1)",
        pb.ERROR_CODE_INVALID_ARGUMENT,
        1,
        "torch (softmax); write model.logits.output",
    ),
    ("x = model.logits[0]", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "indexed; write model.logits.output[0]"),
    ("x = model.samples == 5", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "compared with numbers; write model.samples.output"),
    ("x = " + LAYER + ".argmax(-1)", pb.ERROR_CODE_INVALID_ARGUMENT, 1, "[1].output.argmax"),
    (
        "model.logits = torch.zeros(1, 500)",
        pb.ERROR_CODE_INVALID_ARGUMENT,
        1,
        "assign its value: model.logits.output = …",
    ),
    ("x = model.run_with_cache('Hello')", pb.ERROR_CODE_UNKNOWN_LOCATION, 1, "cache = tracer.cache()"),
    (
        "model.logits.output.sum().backward()",
        pb.ERROR_CODE_INTERVENTION,
        1,
        "No gradient goes through the served model",
    ),
    (
        LAYER + ".mlp.output.requires_grad_()\nmodel.logits.output.sum().backward()",
        pb.ERROR_CODE_INTERVENTION,
        2,
        "torch.enable_grad()",
    ),
    ("while True: pass", pb.ERROR_CODE_DEADLINE_EXCEEDED, 1, "longer than"),
    (
        "while True:\n    try:\n        1 / 0\n    except:\n        pass",
        pb.ERROR_CODE_DEADLINE_EXCEEDED,
        None,
        "longer than",
    ),
    ("import time\ntime.sleep(60)", pb.ERROR_CODE_DEADLINE_EXCEEDED, 2, "longer than"),
    ("x = []\nwhile True: x.append(torch.ones(1 << 22))", *TOO_MUCH),
    ("x = torch.ones(1 << 40)", pb.ERROR_CODE_INTERVENTION, 1, "allocate"),
    ("x = 'a' * (1 << 40)", pb.ERROR_CODE_INTERVENTION, 1, "MemoryError"),
    ("def f(): return f()\nf()", pb.ERROR_CODE_INTERVENTION, 1, "RecursionError"),
    ("x = torch.ones(1 << 25).save()", pb.ERROR_CODE_QUOTA_EXCEEDED, None, "more than the 64 MiB"),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_failing_block(bench: Bench, case: int) -> None:
    source, code, line, message = CASES[case]
    layers = "model.transformer.h" if bench.arch == "gpt2" else "model.model.layers"
    source = source.replace("{block}", layers + "[1]").replace("{layers}", layers)
    beside = Block([3, 77, 4], "token = model.samples.output.save()", {"max_tokens": 2, "ignore_eos": True})
    failing = Block(PROMPT, source, {"max_tokens": 2, "ignore_eos": True})
    good, bad, plain = bench.engine.run_traces([[beside], [failing]], plain=(OTHER,))
    check_failed(bad, code, message, line)
    assert bad.failure is not None
    if line is not None:
        assert bad.failure.frames[-1].filename == "<block>"
        assert bad.failure.frames[-1].text == source.splitlines()[line - 1]
    assert not bad.saved
    assert "executor" not in str(bad.failure.frames)
    assert good.failure is None
    assert good.saved["token"].item() == bench.oracle.run([3, 77, 4]).tokens[0]
    assert plain.token_ids == bench.engine.plain(OTHER).token_ids


def test_an_error_ends_the_request_in_its_step(bench: Bench) -> None:
    source = "for s in tracer.iter[1:]:\n    raise KeyError('k')"
    [ran] = bench.engine.run(Block(PROMPT, source, {"max_tokens": 60, "min_tokens": 50, "ignore_eos": True}))
    assert len(ran.token_ids) == 2
    assert ran.failure is not None


def test_one_failing_invoke_leaves_the_trace_others_saves(bench: Bench) -> None:
    rans = bench.engine.run(Block(PROMPT, "a = model.logits.output.save()"), Block([1, 2], "b = nothing"))
    assert rans[0].failure is None
    assert "a" in rans[0].saved
    assert rans[1].failure is not None


def test_dropped_traces_leave_nothing(bench: Bench) -> None:
    bench.engine.give_up(Block(PROMPT, "for s in tracer.iter[:]:\n    model.logits.output\n"), steps=2)
    assert bench.engine.interleaver.idle


def test_a_block_that_catches_a_missed_location_is_not_given_the_next_step(bench: Bench) -> None:
    """The location that it asks for next, in the step that is over, has passed; the next step's value is not taken for it."""
    tree = bench.engine.worker.interpose_tree
    tree._order["lm_head", "output"] = tree.order_of("logits", "output") - 1  # as if a forward had called it
    source = (
        "errors = [].save()\nfor ask in (lambda: model.lm_head.output, lambda: {at}.output, lambda: model.logits.output):\n"
        "    try:\n        errors.append(ask())\n    except Exception as error:\n        errors.append(str(error))\n"
    ).replace("{at}", bench.block(1).replace(".1", "[1]").join(["model.", ""]))
    try:
        [ran] = bench.engine.run(Block(PROMPT, source, {"max_tokens": 3, "ignore_eos": True}))
    finally:
        del tree._order["lm_head", "output"]
    assert ran.failure is None, ran.failure
    missed, *passed = ran.saved["errors"]
    assert "was not reached in step 0" in missed
    assert all("had already passed" in one for one in passed)
