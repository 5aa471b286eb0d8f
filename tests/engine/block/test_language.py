"""The constructs of a block: steps, several invokes, shared values, saves, prints, the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from executor.core.ended import Ended
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block, check_failed
from tests.oracle import Edit, difference

PROMPT = [5, 400, 17, 99, 256]
LONG = {"max_tokens": 5, "ignore_eos": True}


def test_steps_by_range_index_list_and_all(bench: Bench) -> None:
    truth = bench.oracle.run(PROMPT, 5)
    for steps, selection in (
        ([0, 1, 2, 3, 4], "tracer.iter[:]"),
        ([0, 1, 2, 3, 4], "tracer.all()"),
        ([1, 2], "tracer.iter[1:3]"),
        ([0, 2, 4], "tracer.iter[::2]"),
        ([3], "tracer.iter[3]"),
        ([0, 4], "tracer.iter[[0, 4]]"),
    ):
        source = f"out, seen = [], []\nfor s in {selection}:\n    seen.append(s)\n    out.append(model.logits.output.save())\n"
        [ran] = bench.engine.run(Block(PROMPT, source + "seen.save()", LONG))
        assert ran.failure is None, ran.failure
        assert ran.saved["seen"] == steps
        for step, logits in zip(steps, ran.saved["out"], strict=True):
            assert difference(logits, truth.logits[step]) <= 1e-4


def test_code_after_an_open_loop_runs_when_the_generation_ends(bench: Bench) -> None:
    source = "n = 0\nfor s in tracer.iter[:]:\n    n += 1\nafter = ['ran', n].save()\nresult = tracer.result.save()"
    [ran] = bench.engine.run(Block(PROMPT, source, LONG))
    assert ran.saved["after"] == ["ran", 5]
    assert ran.saved["result"].token_ids == ran.token_ids
    assert ran.saved["result"].prompt_token_ids == PROMPT


def test_a_range_longer_than_the_generation_says_so(bench: Bench) -> None:
    source = "import interpose\nn = 0\nfor s in tracer.iter[:9]:\n    n += 1\nn = interpose.save([n])"
    [ran] = bench.engine.run(Block(PROMPT, source, LONG))
    assert ran.saved["n"] == [5]
    assert "ended after 5 steps" in ran.logs


def test_next_moves_one_module_on(bench: Bench) -> None:
    at = expression(bench.block(2))
    pick = "[0] + " + at + ".output[1]" if bench.arch == "llama" else ""
    source = (
        f"a = ({at}.output{pick}).save()\n{at}.next()\nb = ({at}.output{pick}).save()\n"
        f"c = ({at}.next().output{pick}).save()\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source, LONG))
    assert ran.failure is None, ran.failure
    truth = bench.oracle.run(PROMPT, 3)
    for step, name in enumerate("abc"):
        value = truth.value(bench.block(2), "output", step)
        expected = value[0] + value[1] if isinstance(value, tuple) else value
        assert difference(ran.saved[name], expected) <= 1e-4


def test_a_tuple_of_the_model_is_a_tuple_in_a_block(bench: Bench) -> None:
    """It passes for one, and every way to read it gives what was assigned, which is what the model goes on with."""
    path = bench.block(1) + (".attn.c_attn" if bench.arch == "gpt2" else ".self_attn.qkv_proj")
    at = expression(path)
    source = (
        f"out = {at}.output\nkinds = [isinstance(out, tuple), isinstance(out, list), len(out)].save()\n"
        "h = out[0] if isinstance(out, tuple) else out\nbefore = h.save()\nout[0] = h * 2\n"
        f"now, bias = out\nsame = [out[0] is now, {at}.output[0] is now, out is {at}.output, bias].save()\n"
        "stacked = torch.stack(out[:1] + out[:1]).save()\nwhole = out.save()\nlogits = model.logits.output.save()\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    assert ran.saved["kinds"] == [True, False, 2] and ran.saved["same"] == [True, True, True, None]
    truth = bench.oracle.run(PROMPT, 1, [Edit(path, "output", lambda value: (value[0] * 2, None))])
    expected = bench.oracle.run(PROMPT).value(path)[0]
    assert difference(ran.saved["before"], expected) <= 1e-4
    assert type(ran.saved["whole"]) is tuple and difference(ran.saved["whole"][0], expected * 2) <= 1e-4
    assert difference(ran.saved["stacked"], torch.stack([expected * 2] * 2)) <= 1e-4
    assert difference(ran.saved["logits"], truth.logits[0]) <= 1e-4
    late = f"out = {at}.output\nmodel.logits.output\nout[0] = out[0] * 2\n"
    check_failed(bench.engine.run(Block(PROMPT, late))[0], pb.ERROR_CODE_INVALID_ARGUMENT, "had gone on from there", 3)


def test_a_save_is_a_snapshot(bench: Bench) -> None:
    """What is saved stays as it was, though the block and the model change the tensor afterwards."""
    at = expression(bench.block(1) + ".mlp")
    source = f"before = {at}.output.save()\n{at}.output[:] = 0\nafter = {at}.output.save()\n"
    [ran] = bench.engine.run(Block(PROMPT, source))
    truth = bench.oracle.run(PROMPT).value(bench.block(1) + ".mlp")
    assert difference(ran.saved["before"], truth) <= 1e-4
    assert not ran.saved["after"].any()


def test_writing_through_a_saved_value_reaches_the_model(bench: Bench) -> None:
    at = expression(bench.block(1) + ".mlp")
    [ran] = bench.engine.run(Block(PROMPT, f"h = {at}.output.save()\nh[:] = 0\nlogits = model.logits.output.save()"))
    [same] = bench.engine.run(Block(PROMPT, f"{at}.output[:] = 0\nlogits = model.logits.output.save()"))
    assert torch.equal(ran.saved["logits"], same.saved["logits"])
    assert ran.saved["h"].any()


# Arrays share memory with tensors on CPUs.
NUMPY = [
    "{at}.numpy()[:] = 0.5",
    "import numpy\nnumpy.asarray({at})[...] = 0.5",
    "{at}.detach().numpy().fill(0.5)",
] * current_platform.is_cpu()


@pytest.mark.parametrize(
    "write",
    [
        "{at}.data[:] = 0.5",
        "{at}.data = {at}.data * 0 + 0.5",
        *NUMPY,
        "h = {at}.data\nh *= 0\nh += 0.5",
        "torch.from_dlpack({at}.data).fill_(0.5)",
        "{at}.untyped_storage().copy_(torch.full_like({at}, 0.5).untyped_storage())",
        "with torch.inference_mode():\n    {at}[:] = 0.5",
    ],
)
def test_writes_that_torch_does_not_count_reach_the_model_too(bench: Bench, write: str) -> None:
    path = bench.block(1) + ".mlp"
    source = write.format(at=expression(path) + ".output") + "\nlogits = model.logits.output.save()"
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    truth = bench.oracle.run(PROMPT, 1, [Edit(path, "output", lambda value: value * 0 + 0.5)])
    assert difference(ran.saved["logits"], truth.logits[0]) <= 1e-4
    assert difference(truth.logits[0], bench.oracle.run(PROMPT).logits[0]) > 1e-3
    # The system counts them: what was changed must not be computed anew without the change.
    assert ran.accounting is not None
    assert [one.location for one in ran.accounting.locations if one.written] == [f"{path}.output"]


@pytest.mark.parametrize("end", ["", "\nx = model.samples.output", "\ntracer.stop()"])
def test_a_write_that_comes_too_late_is_an_error(bench: Bench, end: str) -> None:
    """Also where it is the last thing that a block does. A copy is the block's own."""
    at = expression(bench.block(1) + ".mlp")
    [ran] = bench.engine.run(Block(PROMPT, f"h = {at}.output\nh *= 1\nlogits = model.logits.output\nh[:] = 0{end}"))
    assert ran.failure is not None
    assert ran.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert ran.failure.location == f"{bench.block(1)}.mlp.output"
    assert "cannot be applied" in ran.failure.message
    own = f"h = {at}.output.clone()\nx = model.logits.output.clone()\nh[:] = 0\nx[:] = 1{end}\n"
    [fine] = bench.engine.run(Block(PROMPT, own))
    assert fine.failure is None, fine.failure


def test_save_on_a_line_of_its_own(bench: Bench) -> None:
    """The name is bound to what it was bound to before, and comes back all the same, as it was when it was saved."""
    at = expression(bench.block(1))
    source = (
        f"hidden = {at}.mlp.output\nhidden.save()\nhidden[:] = 0\nwhole = {at}.output\nwhole.save()\n"
        "logits = model.logits.output\nearly = logits.save()\nlogits[:] += 1\nlogits.save()\nrow = logits[0]\nrow.save()\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    truth = bench.oracle.run(PROMPT, edits=[Edit(f"{bench.block(1)}.mlp", "output", torch.zeros_like)])
    assert difference(ran.saved["hidden"], truth.value(f"{bench.block(1)}.mlp")) <= 1e-4
    assert difference(ran.saved["whole"], truth.value(bench.block(1))) <= 1e-4
    assert difference(ran.saved["early"], truth.logits[0]) <= 1e-4
    assert difference(ran.saved["logits"], truth.logits[0] + 1) <= 1e-4
    assert difference(ran.saved["row"], truth.logits[0][0] + 1) <= 1e-4


def test_an_accumulator_of_the_users_own_comes_back_as_it_ended(bench: Bench) -> None:
    source = "total = torch.zeros(1).save()\nfor s in tracer.iter[:]:\n    total += s\n"
    [ran] = bench.engine.run(Block(PROMPT, source, LONG))
    assert ran.saved["total"].item() == 10


def test_containers_come_back_when_anything_in_them_is_saved(bench: Bench) -> None:
    source = (
        "d = {'a': [model.logits.output.save(), 3], 'b': {'c': (1, 'x')}}\n"
        "unsaved = model.samples.output\nnested = [[[d]]]\nplain = {'k': 1}\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert set(ran.saved) == {"d", "nested"}
    assert ran.saved["nested"][0][0][0] is ran.saved["d"]
    assert ran.saved["d"]["b"] == {"c": (1, "x")}


def test_invokes_share_saved_names_of_the_outer_block(bench: Bench) -> None:
    rans = bench.engine.run(
        Block(PROMPT, "acc.append(model.logits.output.argmax().item())\nn += 1"),
        Block([1, 2, 3], "acc.append(model.logits.output.argmax().item())\nn += 1"),
        shared={"acc": [], "n": 0},
    )
    ends = [ran for ran in rans if ran.updates or "n" in ran.saved]
    assert len(ends) == 1, "shared values are sent once, by the invoke that ends last"
    assert ends[0].saved["n"] == 2
    assert sorted(next(iter(ends[0].updates.values()))) == sorted(ran.token_ids[0] for ran in rans)


def test_a_captured_list_that_got_saved_values_comes_back(bench: Bench) -> None:
    outs: list[object] = []
    [ran] = bench.engine.run(Block(PROMPT, "outs.append(model.logits.output.save())", captured={"outs": outs}))
    [[logits]] = ran.updates.values()
    assert difference(logits, bench.oracle.run(PROMPT).logits[0]) <= 1e-4


def test_prints_and_logs_arrive(bench: Bench) -> None:
    [ran] = bench.engine.run(Block(PROMPT, "print('a', 1, sep='-')\ntracer.log('b', 2)\nprint('c', end='')"))
    assert ran.logs == "a-1\nb 2\nc"


def test_stop_ends_the_request_whatever_min_tokens_say(bench: Bench) -> None:
    source = "first = model.logits.output.save()\nfor s in tracer.iter[1:]:\n    tracer.stop()\nnever = [1].save()"
    [ran] = bench.engine.run(Block(PROMPT, source, {"max_tokens": 50, "min_tokens": 40, "ignore_eos": True}))
    assert ran.state is Ended.STOPPED
    assert ran.failure is None
    assert len(ran.token_ids) == 2
    assert set(ran.saved) == {"first"}


def test_random_numbers_are_the_traces_own(bench: Bench) -> None:
    """A block's random numbers leave the engine's generators where they were."""
    state = torch.get_rng_state()
    [ran] = bench.engine.run(Block(PROMPT, "x = torch.rand(3).save()\nmodel.logits.output\ny = torch.rand(3).save()"))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(ran.saved["x"], ran.saved["y"])


def test_autograd_in_a_block(bench: Bench) -> None:
    source = (
        "with torch.enable_grad():\n    h = model.logits.output.clone().requires_grad_()\n"
        "    h.pow(2).sum().backward()\ng, v = h.grad.save(), h.detach().save()\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    assert difference(ran.saved["g"], 2 * ran.saved["v"]) <= 1e-5
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_inputs_are_read_and_assigned(bench: Bench) -> None:
    """`.inputs` is (args, kwargs); a changed argument does what the same change does in transformers."""
    path = bench.block(1) + (".mlp.c_proj" if bench.arch == "gpt2" else ".mlp.down_proj")
    at = expression(path)
    truth = bench.oracle.run(PROMPT)
    [read] = bench.engine.run(
        Block(PROMPT, f"args, kwargs = {at}.inputs\nx, rest = args[0].save(), [len(kwargs)].save()")
    )
    assert read.failure is None, read.failure
    assert difference(read.saved["x"], truth.value(path, "input")) <= 1e-4
    assert read.saved["rest"] == [0]
    edited = bench.oracle.run(PROMPT, 1, [Edit(path, "input", lambda value: value.flip(-1))])
    for write in (
        f"{at}.inputs[0][0] = {at}.input.flip(-1)",
        f"args, kwargs = {at}.inputs\n{at}.inputs = ((args[0].flip(-1), *args[1:]), kwargs)",
        f"{at}.input[:] = {at}.input.flip(-1)",
    ):
        [ran] = bench.engine.run(Block(PROMPT, write + "\nlogits = model.logits.output.save()"))
        assert ran.failure is None, ran.failure
        assert difference(ran.saved["logits"], edited.logits[0]) <= 1e-4


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 3, "top_k": 7},
    {"temperature": 1.3, "seed": 11, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {77: 50.0}},
    {"temperature": 0.0, "allowed_token_ids": [3, 4, 5, 6]},
    {"temperature": 0.7, "seed": 5, "min_tokens": 4, "stop_token_ids": [9], "bad_words": ["the"]},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
]


def test_sampling_parameters_mean_what_they_mean_to_the_engine(bench: Bench) -> None:
    for sampling in SAMPLINGS:
        sampling = {"max_tokens": 8, **sampling}
        source = "for s in tracer.iter[:]:\n    model.logits.output\ntokens = tracer.result.token_ids.save()"
        [ran] = bench.engine.run(Block(PROMPT, source, sampling))
        assert ran.failure is None, ran.failure
        assert ran.saved["tokens"] == list(bench.engine.plain(PROMPT, **sampling).token_ids), sampling
