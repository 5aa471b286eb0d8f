"""For how many of its prompt's last rows a block may ask is read off its text; what is not known is no proof."""

from __future__ import annotations

import pytest

from executor.plan.prompt_rows import ASKS_ALL, Asked, rows_of_prompt
from executor.plan.row_values import RowValues
from executor.plan.tails import Touched
from interpose.v1 import model_pb2 as pb
from interpose.v1.trace_pb2 import SessionVariable
from interpose.v1.value_pb2 import Binding, Items, Value
from tests.unit.executor.plan.test_prompt_rows import ANY, LATER, NAMES, trace_of

ROWS = "[tokens, 8]"


def described() -> pb.ModelDescription:
    made = pb.ModelDescription()
    for path in ("", "model", "model.layers", "model.layers.0", "model.layers.1", "model.layers.0.mlp", "lm_head"):
        made.modules.add(path=path)
    made.modules[-1].parameters.add(name="weight")
    made.canonical.add(path="blocks")
    for i in range(3):
        values = [("resid_pre", ROWS, ""), ("resid_post", ROWS, ""), ("resid_mid", "", "" if i else "it has none")]
        block = made.canonical.add(path=f"blocks.{i}")
        for name, shape, refusal in values:
            block.values.add(name=name, shape=shape or ROWS, refusal=refusal)
        attn = made.canonical.add(path=f"blocks.{i}.attn")
        attn.values.add(name="q", shape="[tokens, 2, 4]")
        attn.values.add(name="pattern", shape="[2, tokens, keys]")
    norm = made.canonical.add(path="final_norm")
    norm.values.add(name="output", shape=ROWS)
    made.canonical.add(path="unembed").values.add(name="output", shape="[1, vocabulary]")
    return made


FORMS = {
    "model.layers.0.output": "(rr)",
    "model.layers.1.output": "(rr)",
    "model.layers.0.mlp.output": "r",
    "lm_head.input": "(r-)",
}
VALUES = RowValues.of(described(), FORMS)
LAST = "h = model.blocks[1].resid_post[-1].save()\n"
GIVEN = {
    "helper": Value(ref=2),
    "block": Value(module="blocks.1"),
    "vectors": Value(list=Items(items=[Value(ref=0), Value(integer=1)])),
    "parts": Value(list=Items(items=[Value(module="blocks.1")])),
    "minus": Value(integer=-2),
}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GIVEN.items():
        monkeypatch.setitem(NAMES, name, value)


def asked(text: str, *others: str, **fields: object) -> Asked | Touched:
    return rows_of_prompt(trace_of(text, *others, **fields), 0, VALUES)


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("", None, 0),
        (LAST, None, 1),
        (LAST + "logits = model.logits.output.save()\n" + ANY, None, 1),
        ("model.blocks[1].resid_post[-1] += vector\n", None, 1),
        ("model.blocks[1].resid_post[-1] = vector\nmodel.blocks[2].resid_post[-3:] *= two\n", None, 3),
        ("x = model.blocks[0].resid_pre[-4:-1, :two].mean(0).save()\n", None, 4),
        ("x = model.blocks[minus].attn.q[minus, 0].save()\n", None, 2),
        ("x = model.blocks[0].resid_pre[two].save()\n", 2, 1),
        ("x, y = model.blocks[0].resid_pre[5:], model.blocks[0].resid_post[-1]\n", 5, 1),
        ("kept.append(block.resid_post[-1].save())\n", None, 1),
        ("h = block.resid_post\nh[-1] += vector\nkept.append(h[-2].save())\n", None, 2),
        ("b = model.blocks[2]\nif b.resid_pre[-1].norm() > 3:\n    b.resid_post[-1] = 0\n", None, 1),
        ("for layer in model.blocks:\n    kept.append(model.unembed(model.final_norm(layer.resid_post[-1])).save())\n", None, 1),
        ("for i in range(len(model.blocks)):\n    kept.append(model.blocks[i].resid_post[-1].save())\n", None, 1),
        ("all = [layer.resid_post[-1] for layer in model.blocks[1:]]\n", None, 1),
        ("for i, layer in enumerate(model.blocks):\n    layer.resid_post[-1] += i * vector\n", None, 1),
        ("for layer, v in zip(model.blocks, vectors):\n    layer.resid_post[-1] += v\n", None, 1),
        ("for layer in (model.blocks[0], model.blocks[2]):\n    kept.append(layer.resid_post[-1])\n", None, 1),
        ("x = {i: model.blocks[i].resid_mid[-1] for i in (0, 1)}\n", None, 1),
        ("for step in tracer.iter[:]:\n    block.resid_post[-1] += vector\n" + ANY, None, 1),
        ("for step in tracer.iter[:]:\n    if step == 0:\n        block.resid_post[-2] = 0\n    else:\n        " + ANY, None, 2),
        ("for step in tracer.iter[:]:\n    if step > 0:\n        continue\n    block.resid_post[-1] += vector\n", None, 1),
        (LAST + LATER, None, 1),
        ("import torch.nn.functional as F\nx = F.normalize(block.resid_post[-1], dim=0).save()\n", None, 1),
        ("with torch.no_grad():\n    x = block.resid_post[-1] @ model.lm_head.weight.T\n", None, 1),
        ("def project(x):\n    return x - x @ vector\nblock.resid_post[-1] = project(block.resid_post[-1])\n", None, 1),
        ("def change(layer):\n    model.blocks[layer].resid_post[-1] += vector\nchange(0)\nchange(2)\n", None, 1),
        ("try:\n    x = block.resid_post[-1].save()\nexcept ValueError as error:\n    tracer.log(error)\n", None, 1),
        ("while True:\n    x = block.resid_post[-1]\n    if x.sum() > 0:\n        break\n", None, 1),
        ("x = block.resid_post[-1]\nlogits = model.logits.output.clone()\nmodel.logits.output[:] = logits + x.sum()\n", None, 1),
        ("print(f'{block.resid_post[-1].norm():.2f}')\n", None, 1),
        ("x = model.final_norm.output[-1]\ny = model.unembed.output[0, two]\n", None, 1),
        ("block = model.blocks[0]\nx = block.resid_post[-1]\n", None, 1),
        ("for step in tracer.iter[:]:\n    if kept:\n        break\n    x = block.resid_post[-1]\n", None, 1),
        ("x = model.model.layers[1].output[0][-1]\ny = model.model.layers[0].mlp.output[-2:]\n", None, 2),
        ("for layer in model.model.layers:\n    h = layer.output[-1]\n    h[-1] += vector\n", None, 1),
        ("x = model.lm_head.input[0][-1]\n", None, 1),
        ("x = model.model.layers[0].output[0]\nh = block.resid_post\n", None, 1),
        ("import interpose\ninterpose.save(block.resid_post[-1])\n", None, 1),
        ("h = block.resid_post\nx = h[-1].to(h.dtype)\ny = x.to(block.resid_pre.device)\n", None, 1),
        ("m = model\nx = m.blocks[0].resid_post[-1]\n", None, 1),
        ("x = (lambda y: y * 2)(block.resid_post[-1])\nx = x + 1\nr = tracer.result\n", None, 1),
    ],
)  # fmt: skip
def test_blocks_that_ask_for_rows_that_are_counted(text: str, first: int | None, last: int) -> None:
    assert asked(text) == Touched(first, last)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = block.resid_post.save()\n", 1),
        ("x = block.resid_post[:, -1]\n", 1),
        ("x = block.resid_post[:-1]\n", 1),
        ("x = block.resid_post[::2]\n", 1),
        ("x = block.resid_post[::-1]\n", 1),
        ("x = block.resid_post[...]\n", 1),
        ("x = block.resid_post[None]\n", 1),
        ("x = block.resid_post[True]\n", 1),
        ("x = block.resid_post[vector]\n", 1),
        ("x = block.resid_post[[-1]]\n", 1),
        ("for i in range(3):\n    x = block.resid_post[-i]\n", 2),
        ("minus = 0\nx = block.resid_post[minus]\n", 2),
        ("x = block.resid_post.shape[0]\n", 1),
        ("x = len(block.resid_post)\n", 1),
        ("x = [row for row in block.resid_post]\n", 1),
        ("x = block.resid_post.mean(0)\n", 1),
        ("x = torch.stack([block.resid_post, block.resid_post])\n", 1),
        ("block.resid_post = vector\n", 1),
        ("block.resid_post += vector\n", 1),
        ("del block.resid_post[-1]\n", 1),
        ("x = block.attn.pattern[-1]\n", 1),
        ("x = block.attn[-1]\n", 1),
        ("x = block.nothing[-1]\n", 1),
        ("x = model.model.layers[0].output[-1].save()\n", 1),
        ("x, y = model.model.layers[0].output\n", 1),
        ("x = model.model.layers[0].output[0, -1]\n", 1),
        ("x = model.model.layers[0].output[2][-1]\n", 1),
        ("x = model.model.layers[0].output[0].save()\n", 1),
        ("model.model.layers[0].output[0] = vector\n", 1),
        ("x = model.lm_head.input[1][-1]\n", 1),
        ("h = model.model.layers[0].output\nx = h[0][-1]\nmodel.logits.output\ny = h[1].mean()\n", 1),
        ("x = model.model.layers[0].inputs[0][-1]\n", 1),
        ("x = model.model.layers[0].mlp.input[-1]\n", 1),
        ("x = model.blocks[7].resid_post[-1]\n", 1),
        ("block.skip(vector)\n", 1),
        ("block.next()\nx = block.resid_post[-1]\n", 1),
        ("cache = tracer.cache()\n" + LAST, 1),
        (LAST + "cache = tracer.cache(modules=[block])\n", 2),
        ("t = tracer\n" + LAST + "t.cache()\n", 3),
        ("x = helper(block.resid_post[-1])\n", 1),
        ("x = thing.blocks\n" + LAST, 1),
        ("x = getattr(block, 'resid_post')\n", 1),
        ("x = eval('block.resid_post')\n", 1),
        ("x = globals()\n", 1),
        ("x = vector.__class__\n", 1),
        ("kept.append(block)\n" + LAST, 1),
        ("x = [model]\n" + LAST, 1),
        ("x = parts[0].resid_post[-1]\n", 1),
        ("for layer in parts:\n    x = layer.resid_post[-1]\n", 1),
        ("h = block.resid_post\nx = h[-1]\ny = h.mean(0)\n", 1),
        ("h = block.resid_post\nlogits = model.logits.output.save()\nx = h.save()\n", 1),
        ("h = block.resid_post\nh = h[-1]\n", 1),
        ("h, x = block.resid_post, 3\n", 1),
        ("b = block\nb = model.blocks[0]\nx = b.resid_post[-1]\n", 1),
        ("def f(b):\n    return b.resid_post.mean()\nx = f(block)\n", 3),
        ("class A:\n    x = block.resid_post[-1]\n", 1),
        ("async def f():\n    pass\n" + LAST, 1),
        ("global h\n" + LAST, 1),
        ("for step in tracer.iter[:]:\n    if kept:\n        break\n    x = block.resid_post[-1]\n" + ANY, 5),
        ("for step in tracer.iter[:]:\n    h = block.resid_post\n    if step > 0:\n        x = h.mean()\n", 1),
        ("if kept:\n    for step in tracer.iter[1:]:\n        h = block.resid_post.mean()\n", 3),
        ("import mine\n" + LAST, 1),
        ("from torch import *\n" + LAST, 1),
        ("x = torch\nx = block.resid_post[-1]\ny = x = block.resid_post\n", 3),
        ("match kept:\n    case [h]:\n        x = block.resid_post[-1]\n", 1),
        ("x = (h := block.resid_post[-1])\n", 1),
    ],
)  # fmt: skip
def test_blocks_that_may_ask_for_any_row(text: str, line: int) -> None:
    found = asked(text)
    assert isinstance(found, Asked) and (found.why, found.line) == (ASKS_ALL, line)


def test_rows_are_counted_from_both_ends() -> None:
    assert [Touched(None, 3).rows(tokens) for tokens in (2, 3, 9)] == [2, 3, 3]
    assert [Touched(5, 3).rows(tokens) for tokens in (4, 7, 9)] == [3, 3, 4]
    assert Touched(5).rows(4) == 1
    assert Touched().rows(9) == 0


def test_names_that_others_may_bind_again() -> None:
    shared = [Binding(name="vector", value=NAMES["vector"])]
    change = "block.resid_post[-1] += vector\n"
    assert asked(change, LATER, shared=shared) == Touched(None, 1)
    assert isinstance(asked(change, "vector = thing\n", shared=shared), Asked)
    assert isinstance(asked(change, variables=[SessionVariable(id="v", entry=0)]), Asked)


def test_a_model_with_modules_of_other_meaning() -> None:
    """A module with the name of the logits or the unembedding hides these."""
    for name in ("logits", "samples", "unembed"):
        made = described()
        made.modules.add(path=name)
        assert isinstance(rows_of_prompt(trace_of(LAST), 0, RowValues.of(made, FORMS)), Asked)
