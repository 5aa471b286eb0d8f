"""Modules applied to a block's own values: `model.lm_head(model.model.norm(h))`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench, expression
from tests.engine.harness import Block
from tests.oracle import Edit, difference, locations

PROMPT = [5, 400, 17, 99, 256, 31, 8]
OTHERS = [[3, 77], [12, 250, 33, 8, 441], [222]]
STEPS = 4
LONG = {"max_tokens": STEPS, "ignore_eos": True}
TOLERANCE = 1e-4


def stream(bench: Bench, layer: int) -> str:
    """The residual stream after a layer, as a block writes it."""
    at = expression(bench.block(layer)) + ".output"
    return at if bench.arch == "gpt2" else f"({at}[0] + {at}[1])"


def final_norm(bench: Bench) -> str:
    return "model.transformer.ln_f" if bench.arch == "gpt2" else "model.model.norm"


def unembed(bench: Bench, hidden: torch.Tensor) -> torch.Tensor:
    """The final norm and the unembedding in transformers."""
    model = bench.oracle.model
    with torch.no_grad():
        return model.lm_head((model.transformer.ln_f if bench.arch == "gpt2" else model.model.norm)(hidden))


def true_stream(bench: Bench, prompt: list[int], layer: int, step: int = 0) -> torch.Tensor:
    value = bench.oracle.run(prompt, STEPS).value(bench.block(layer), "output", step)
    return value if bench.arch == "gpt2" else value[0] + value[1]


def test_a_logit_lens_in_every_layer_and_step(bench: Bench) -> None:
    layers = range(bench.oracle.config.num_hidden_layers)
    lines = ["lens = []", "for step in tracer.iter[:]:"]
    for layer in layers:
        lines.append(f"    lens.append(model.lm_head({final_norm(bench)}({stream(bench, layer)})).save())")
    blocks = [[Block(prompt, "\n".join(lines), LONG)] for prompt in [PROMPT, *OTHERS]]
    rans = bench.engine.run_traces(blocks, plain=tuple(OTHERS))
    for prompt, ran in zip([PROMPT, *OTHERS], rans, strict=False):
        assert ran.failure is None, ran.failure
        for i, value in enumerate(ran.saved["lens"]):
            step, layer = divmod(i, len(layers))
            assert difference(value, unembed(bench, true_stream(bench, prompt, layer, step))) <= TOLERANCE
    for prompt, plain in zip(OTHERS, rans[-len(OTHERS) :], strict=True):
        assert plain.token_ids == bench.engine.plain(prompt).token_ids


def applicable(bench: Bench) -> list[str]:
    """Paths of the modules in one layer and around the layers whose input and output the oracle knows; none has attention."""
    known = {(at.path, at.kind) for at in locations(bench.checkpoint)}
    paths = [path for path, kind in known if kind == "input" and (path, "output") in known]
    inside = [path for path in paths if path.startswith(bench.block(1) + ".") or bench.block(0)[:-1] not in path]
    return sorted(path for path in inside if not path.endswith((".attn", ".self_attn")))


def test_a_module_makes_of_its_inputs_what_the_forward_pass_makes_of_them(bench: Bench) -> None:
    paths = applicable(bench)
    assert len(paths) >= 7, paths
    blocks = []
    for path in paths:
        at = expression(path)
        source = (
            f"made = []\nfor step in tracer.iter[:2]:\n    args, kwargs = {at}.inputs\n    before = [x.clone() for x in args]\n"
            f"    y = {at}(*args, **kwargs)\n    assert all(torch.equal(x, y) for x, y in zip(args, before))\n"
            f"    made.append(y)\n    made.append({at}.output)\nmade.save()\n"
        )
        blocks.append([Block(PROMPT, source, LONG)])
    for path, ran in zip(paths, bench.engine.run_traces(blocks), strict=True):
        assert ran.failure is None, (path, ran.failure)
        for made, output in zip(ran.saved["made"][::2], ran.saved["made"][1::2], strict=True):
            assert difference(made, output) <= TOLERANCE, path


def test_wherever_the_block_is(bench: Bench) -> None:
    """Before the first location, at the logits, at the samples, in a later step, and after the result."""
    head = f"model.lm_head({final_norm(bench)}(h)).save()"
    source = (
        f"a = {head}\nx = model.logits.output\nb = {head}\nx = model.samples.output\nc = {head}\n"
        f"for step in tracer.iter[1:]:\n    d = {head}\nx = tracer.result\ne = {head}\n"
    )
    hidden = true_stream(bench, PROMPT, 1)
    [ran] = bench.engine.run(Block(PROMPT, source, LONG, {"h": hidden}))
    assert ran.failure is None, ran.failure
    for name in "abcde":
        assert difference(ran.saved[name], unembed(bench, hidden)) <= TOLERANCE


def test_any_number_of_rows_and_dimensions(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(300, bench.oracle.config.hidden_size, generator=generator)
    source = (
        f"many = model.lm_head({final_norm(bench)}(h)).save()\none = model.lm_head({final_norm(bench)}(h[7])).save()\n"
        f"grid = model.lm_head({final_norm(bench)}(h.view(3, 100, -1))).save()\nlogits = model.logits(h[:2]).save()\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source, captured={"h": hidden}))
    assert ran.failure is None, ran.failure
    expected = unembed(bench, hidden)
    assert difference(ran.saved["many"], expected) <= TOLERANCE
    assert difference(ran.saved["one"], expected[7]) <= TOLERANCE
    assert difference(ran.saved["grid"], expected.view(3, 100, -1)) <= TOLERANCE
    with torch.no_grad():
        assert difference(ran.saved["logits"], bench.oracle.model.lm_head(hidden[:2])) <= TOLERANCE


def test_an_embedding(bench: Bench) -> None:
    at = "model.transformer.wte" if bench.arch == "gpt2" else "model.model.embed_tokens"
    [ran] = bench.engine.run(Block(PROMPT, f"h = {at}(torch.tensor([[7, 9], [499, 0]])).save()"))
    with torch.no_grad():
        expected = bench.oracle.model.get_input_embeddings()(torch.tensor([[7, 9], [499, 0]]))
    assert difference(ran.saved["h"], expected) <= TOLERANCE


def test_nobody_who_waits_at_the_module_notices(bench: Bench) -> None:
    """Waiting blocks get their own rows from the forward pass, and so does the one that applied the module."""
    path = bench.block(2) + ".mlp"
    at = expression(path)
    apply = Block(PROMPT, f"h = {stream(bench, 1)}\nfor i in range(3):\n    x = {at}(h)\nown = {at}.output.save()")
    waiting = [[Block(prompt, f"own = {at}.output.save()\nx = {at}.output")] for prompt in OTHERS]
    rans = bench.engine.run_traces([waiting[0], [apply], *waiting[1:]])
    for prompt, ran in zip([OTHERS[0], PROMPT, *OTHERS[1:]], rans, strict=True):
        assert ran.failure is None, ran.failure
        assert difference(ran.saved["own"], bench.oracle.run(prompt).value(path)) <= TOLERANCE


@pytest.mark.parametrize("write", ["{at}[:] = {new}", "{at} = {new}"])
def test_a_block_stays_at_its_location_while_it_applies_a_module(bench: Bench, write: str) -> None:
    """What is written there before and after reaches the model, for each of several blocks at the same place."""
    path = bench.block(1) + ".mlp"
    at = expression(path) + ".output"
    parts = {"at": at, "new": f"{expression(path)}({at}) * 0.5"}
    source = (
        write.format(**parts) + "\n" + write.format(**parts | {"new": at + " + 1"}) + "\nl = model.logits.output.save()"
    )
    plain = f"{at}[:] *= 2\nl = model.logits.output.save()"
    other = f"{at} = {at} * 3\nl = model.logits.output.save()"
    programs = [(OTHERS[1], other), (PROMPT, source), (OTHERS[0], plain)]
    rans = bench.engine.run_traces([[Block(prompt, program)] for prompt, program in programs])
    mlp = copy.deepcopy(bench.oracle.model.get_submodule(path))  # a copy has no hooks of the oracle

    def applied(value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return mlp(value) * 0.5 + 1

    edits: list[Any] = [lambda value: value * 3, applied, lambda value: value * 2]
    for (prompt, _), ran, edit in zip(programs, rans, edits, strict=True):
        assert ran.failure is None, ran.failure
        truth = bench.oracle.run(prompt, 1, [Edit(path, "output", edit)])
        assert difference(ran.saved["l"], truth.logits[0]) <= TOLERANCE


def test_rotary_embedding_and_activation_take_whole_values(bench: Bench) -> None:
    if bench.arch == "gpt2":
        source = f"y = {expression(bench.block(0))}.mlp.act(x).save()"
        [ran] = bench.engine.run(Block(PROMPT, source, captured={"x": torch.linspace(-3, 3, 12).view(3, 4)}))
        expected = bench.oracle.model.transformer.h[0].mlp.act(torch.linspace(-3, 3, 12).view(3, 4))
        assert difference(ran.saved["y"], expected) <= TOLERANCE
        return
    x = torch.linspace(-3, 3, 40).view(2, 20)
    layer = expression(bench.block(0))  # one rotary embedding is shared by all layers, and is the first one's
    heads = bench.oracle.config.hidden_size // bench.oracle.config.num_attention_heads
    query = torch.randn(3, 2 * heads, generator=torch.Generator().manual_seed(1))
    source = (
        f"y = {layer}.mlp.act_fn(x).save()\n"
        f"q, k = {layer}.self_attn.rotary_emb(torch.tensor([4, 0, 9]), q0, q0)\nq, k = q.save(), k.save()\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source, captured={"x": x, "q0": query}))
    assert ran.failure is None, ran.failure
    assert difference(ran.saved["y"], torch.nn.functional.silu(x[:, :10]) * x[:, 10:]) <= TOLERANCE
    cos, sin = bench.oracle.model.model.rotary_emb(query, torch.tensor([[4, 0, 9]]))
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    expected, _ = apply_rotary_pos_emb(
        query.view(1, 3, 2, heads).transpose(1, 2), query.view(1, 3, 2, heads).transpose(1, 2), cos, sin
    )
    assert difference(ran.saved["q"], expected.transpose(1, 2).reshape(3, -1)) <= TOLERANCE
    assert torch.equal(ran.saved["q"], ran.saved["k"])


def test_a_refusal_can_be_caught_and_the_block_goes_on(bench: Bench) -> None:
    source = (
        f"try:\n    x = {final_norm(bench)}(torch.ones(2, 3))\nexcept Exception as error:\n    said = str(error).save()\n"
        f"y = {final_norm(bench)}(h).save()\nl = model.logits.output.save()"
    )
    hidden = true_stream(bench, PROMPT, 1)
    [ran] = bench.engine.run(Block(PROMPT, source, captured={"h": hidden}))
    assert ran.failure is None, ran.failure
    assert "[2, 3]" in ran.saved["said"]
    assert difference(ran.saved["l"], bench.oracle.run(PROMPT).logits[0]) <= TOLERANCE


REFUSALS = [
    ("{block}(torch.ones(2, W))", "holds attention"),
    ("{layers}(torch.ones(2, W))", "a list of modules"),
    ("model(torch.ones(2, W))", "holds attention"),
    ("model.logits_processor(torch.ones(2, W))", "model.logits(h)"),
    ("model.samples(torch.ones(2, W))", "not a module"),
    ("{norm}(torch.ones(2, W + 1))", "of shape [rows,"),
    ("{norm}(torch.ones(2, W).long())", "torch.int64"),
    ("{norm}(torch.ones(2, W).double())", "pass x.to(torch.float32)"),
    ("{norm}([1.0, 2.0])", "needs a tensor"),
    ("{norm}(torch.ones(2, W), [1.0, 2.0])", "was given a list"),
    ("{block}.mlp(torch.ones(2, W + 1))", "of shape [rows,"),
    ("{embed}(torch.tensor([0, 500]))", "ids from 0 to 499"),
    ("{embed}(torch.tensor([-1]))", "ids from 0 to 499"),
    ("{embed}(torch.ones(2))", "integers"),
    ("model.lm_head(torch.ones(1, W).expand(400000, W))", "at most"),
    ("model.logits(torch.ones(2, W + 1))", "of shape [rows,"),
]


@pytest.mark.parametrize("case", range(len(REFUSALS)))
def test_refusals_name_the_users_line(bench: Bench, case: int) -> None:
    call, message = REFUSALS[case]
    layers = "model.transformer.h" if bench.arch == "gpt2" else "model.model.layers"
    embed = "model.transformer.wte" if bench.arch == "gpt2" else "model.model.embed_tokens"
    call = call.format(block=layers + "[1]", layers=layers, norm=final_norm(bench), embed=embed)
    call = call.replace("W", str(bench.oracle.config.hidden_size))
    [ran] = bench.engine.run(Block(PROMPT, f"x = 1\ny = {call}\n"))
    assert ran.failure is not None
    expected = pb.ERROR_CODE_QUOTA_EXCEEDED if message == "at most" else pb.ERROR_CODE_INVALID_ARGUMENT
    assert ran.failure.code == expected
    assert message in ran.failure.message
    assert ran.failure.frames[-1].line == 2


def test_gradients_do_not_go_through_a_module(bench: Bench) -> None:
    source = (
        f"with torch.enable_grad():\n    x = torch.ones(2, {bench.oracle.config.hidden_size}).requires_grad_()\n"
        f"    y = {final_norm(bench)}(x)\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is not None
    assert "x.detach()" in ran.failure.message


def test_an_endless_loop_of_calls_is_ended(bench: Bench) -> None:
    source = f"while True:\n    {final_norm(bench)}(torch.ones(2, {bench.oracle.config.hidden_size}))\n"
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is not None
    assert ran.failure.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
    assert ran.failure.frames[-1].line == 2
