"""Blocks that are plans give what the greenlet gives, bit for bit; other blocks are refused with their line and a way out."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch

from executor.block.barrier import Barrier
from executor.plan.compile import compile_region, survey
from executor.plan.eligible import regions
from executor.plan.refuse import Refused
from tests.unit.executor.plan.bench import ENVOY, LAYERS, SOURCES, Request, both, context, functions, unit

HELPERS = functions(
    """
    import torch
    FACTOR = 2

    def damped(x, k=3):
        return torch.tanh(x) * k / shrink(k)

    def shrink(k):
        return 1 + abs(k) * FACTOR

    def keep(x, into):
        into.append(x.clone())

    def counted(x):
        counted.calls = 1
        return x

    def timed(x):
        return x * time.time()

    twice = lambda x: x * 2
    """,
    {},
)
HELPERS["timed"].__globals__["time"] = __import__("time")


def names(number: int) -> dict[str, Any]:
    """Return what each request's notebook has; tensors differ from request to request, but for `shared`."""
    made = torch.Generator().manual_seed(number)
    return {
        **HELPERS,
        "shared": torch.ones(19, 8) / 3,
        "v": torch.randn(19, generator=made),
        "w": torch.randn(19, 8, generator=made),
        "scale": torch.randn((), generator=made),
        "sae": {"enc": torch.randn(19, 24, generator=made), "dec": [torch.randn(24, 19, generator=made)]},
        "neurons": [2, 5],
        "index": torch.tensor([1, 4]),
        "alpha": 0.37,
        "spots": [ENVOY.layers[0], ENVOY.layers[2].mlp],
        "store": torch.zeros(8, 19),
        "log": {"norms": [], "names": ["a"]},
        "F": torch.nn.functional,
        "time": __import__("time"),
        "random": __import__("random"),
        "object_of_mine": object(),
        "module_of_mine": torch.nn.Linear(19, 19),
        "meet": Barrier(0, 2, lambda barrier: None),
    }


# A name, the body of the loop, what stands before it, what stands after it.
ELIGIBLE = {
    "a capture": ("kept.append(model.layers[1].output[0].save())", "", ""),
    "a capture of all layers": (f"for i in range({LAYERS}):\n    kept.append(model.layers[i].output[1].save())", "", ""),
    "steering in place": ("model.layers[1].output[0][:] += alpha * v", "", ""),
    "steering the stream": ("model.layers[1].resid_post += v", "", ""),
    "the stream is assigned": ("model.layers[0].resid_post = model.layers[0].resid_post * alpha", "", ""),
    "an item is assigned": ("o = model.layers[1].output\no[0] = o[0] * 2", "", ""),
    "an output is assigned": ("model.layers[1].mlp.output = model.layers[1].mlp.output.relu()", "", ""),
    "an input is assigned": ("model.layers[1].mlp.input = model.layers[1].mlp.input * 0.5", "", ""),
    "the inputs are read": ("args, kwargs = model.layers[1].inputs\nkept.append((args[1] + 1).save())", "", ""),
    "a part of a projection": ("model.layers[1].attn.qkv.q[:, neurons] = 0", "", ""),
    "an index of a tensor": ("model.layers[1].mlp.output[:, index] *= 2", "", ""),
    "the logits": ("model.logits.output[:, 3] = -100\nkept.append(model.logits.output.argmax(-1).save())", "", ""),
    "a probe": ("kept.append(torch.sigmoid(model.layers[2].output[1] @ w).save())", "", ""),
    "a masked gate": (
        "h = model.layers[1].mlp.output\nh[:] = torch.where((h @ w).amax(-1, keepdim=True) > 0, h + v, h)",
        "",
        "",
    ),
    "an autoencoder": (
        "h = model.layers[1].resid_post\na = torch.relu(h @ sae['enc'])\nkept.append(a.topk(3).values.save())\n"
        "h[:] = a @ sae['dec'][0]",
        "",
        "",
    ),
    "a number of each request": ("model.layers[1].mlp.output[:] *= scale", "", ""),
    "a shared matrix": ("kept.append((model.layers[1].mlp.output @ shared).save())", "", ""),
    "functions of the notebook": ("kept.append(damped(twice(model.layers[1].mlp.output)).save())", "", ""),
    "a comprehension": ("kept.append([s.output[0] * i for i, s in enumerate(spots[:1])])", "", ""),
    "a closure": ("h = model.layers[1].mlp.output\ngrow = lambda x: x + h\nkept.append(grow(h).save())", "", ""),
    "a nested function": ("def f(x, k=2):\n    return x * k\nkept.append(f(model.layers[1].mlp.output))", "", ""),
    "modules in a list": ("for s in spots[1:]:\n    s.output[:] = 0", "", ""),
    "a carried sum": ("total = total + model.layers[1].mlp.output", "total = torch.zeros(1, 19)", "total.save()"),
    "a carried sum in place": ("total += model.layers[1].mlp.output[0]", "total = torch.zeros(19).save()", ""),
    "the step before": (
        "h = model.layers[1].mlp.output\nif previous is not None:\n    kept.append((h - previous).save())\nprevious = h.clone()",
        "previous = torch.zeros(1, 19)",
        "",
    ),
    "a maximum so far": (
        "best = torch.maximum(best, model.logits.output)",
        "best = torch.full((1, 31), -1e9)",
        "best = best.save()",
    ),
    "the last value": ("last = model.layers[1].mlp.output.save()", "", ""),
    "the step in a comparison": ("if step >= 2:\n    model.layers[0].mlp.output[:] = 0", "", ""),
    "every second step": ("if step % 2 == 0:\n    kept.append(model.layers[0].mlp.output.save())", "", ""),
    "the step with a value": ("kept.append((step, step + 1, model.layers[0].mlp.output.save()))", "", ""),
    "the step as a factor": ("model.layers[0].mlp.output[:] *= step", "", ""),
    "the step in an accumulator": (
        "model.layers[0].mlp.output[:] += step\ntotal += step",
        "total = torch.zeros(1).save()",
        "",
    ),
    "a dict by step": ("table[step] = model.layers[0].mlp.output.save()", "", ""),
    "a dict by text": ("table[f'at {step:>2}'] = [model.layers[0].mlp.output.save()]", "", ""),
    "lists in a dict": ("log['norms'].append(model.layers[0].mlp.output.norm())", "log = {'norms': []}.save()", ""),
    "a list that grows by +=": ("kept += [model.layers[0].mlp.output.clone(), 3]", "", ""),
    "a list in the step": ("mine = []\nmine.append(model.layers[0].mlp.output * 2)\nkept.append(torch.stack(mine))", "", ""),
    "a save before an edit": ("h = model.layers[0].mlp.output\nkept.append(h.save())\nh.mul_(2)", "", ""),
    "the code after the loop": (
        "kept.append(model.layers[0].mlp.output[0] * 1)",
        "",
        "whole = torch.stack(kept).mean(0).save()\ncount = [len(kept), step].save()",
    ),
    "a normalisation": ("kept.append(F.layer_norm(model.layers[2].resid_post, (19,)).save())", "", ""),
    "two readings of one location": ("model.layers[1].mlp.output[:] += 1\nmodel.layers[1].mlp.output *= 2", "", ""),
    "an ablation of rows": ("model.layers[1].mlp.output[-1] = model.layers[1].mlp.output[0] * 0.5", "", ""),
    "no_grad": ("with torch.no_grad():\n    kept.append((model.layers[1].mlp.output * 2).save())", "", ""),
    "continue": ("if step == 1:\n    continue\nmodel.layers[1].mlp.output[:] = 0", "", ""),
    "an unpacking": ("a, b = model.layers[1].output\nkept.append((a + b).save())", "", ""),
    "a function that reads what the loop left": (
        "h = model.layers[0].mlp.output.clone()",
        "def left():\n    return h",
        "got = (left() * 2).save()",
    ),
    "a name that is looked up as text": ("h = model.layers[0].mlp.output.clone()", "", "got = globals()['h'].save()"),
    "a slice of columns": ("model.layers[1].mlp.output[..., ::2] = model.layers[1].mlp.output[..., 1::2].mean()", "", ""),
}  # fmt: skip


def block(body: str, before: str = "", after: str = "", loop: str = "for step in tracer.iter[:]:") -> str:
    """Return a block's text; the loop's first statement is on line 4 or later, one line after what stands before it."""
    lines = ["kept, table = [].save(), {}.save()", *before.splitlines(), loop]
    return "\n".join([*lines, textwrap.indent(body, "    "), *after.splitlines()]) + "\n"


@pytest.mark.parametrize("name", ELIGIBLE)
def test_a_plan_gives_what_the_greenlet_gives(name: str) -> None:
    body, before, after = ELIGIBLE[name]
    both(block(body, before, after), names)


# A name, the body of the loop, the line in it (counted from 1), a part of the reason, and what to write instead.
REFUSED = {
    "item": ("f = lambda x: x[0, 0].item()\nx = f(model.layers[0].mlp.output)", 1, r"\.item takes a value", "torch.where"),
    "a chain of calls": ("x = (model.layers[0].mlp.output\n    .sum()\n    .tolist())", 3, r"\.tolist", "torch.where"),
    "tolist": ("x = model.layers[0].mlp.output.tolist()", 1, r"\.tolist", "torch.where"),
    "numpy": ("x = model.layers[0].mlp.output.numpy()", 1, r"\.numpy", "torch.where"),
    "a truth of a tensor": ("h = model.layers[0].mlp.output\nx = not h.sum()", 2, "a value out", "torch.where"),
    "float of a tensor": ("h = model.layers[0].mlp.output\nx = torch.full((1,), float(h.sum()))", 2, "taken out", "torch.where"),
    "an assert on a tensor": ("h = model.layers[0].mlp.output\nassert (h > 0).any()", 2, "a value out", "torch.where"),
    "max of numbers": ("h = model.layers[0].mlp.output\nx = max(h[0, 0], h[0, 1])", 2, "a value out", "torch.where"),
    "torch.equal": ("h = model.layers[0].mlp.output\nx = torch.equal(h, h)", 2, "a value out", "torch.where"),
    "a boolean index": ("h = model.layers[0].mlp.output\nkept.append(h[h > 0])", 2, "boolean index", "mask"),
    "a boolean write": ("h = model.layers[0].mlp.output\nh[h > 0] = 0", 2, "boolean index", "torch.where"),
    "nonzero": ("x = model.layers[0].mlp.output.nonzero()", 1, r"\.nonzero has a shape", "mask"),
    "where of one": ("h = model.layers[0].mlp.output\nx = torch.where(h > 0)", 2, "shape that depends", "mask"),
    "chance": ("h = model.layers[0].mlp.output\nh += torch.rand(19)", 2, "random numbers", "before the loop"),
    "dropout": ("h = F.dropout(model.layers[0].mlp.output)", 1, "random numbers|depends|nobody", ""),
    "Python's chance": ("h = model.layers[0].mlp.output\nh += random.random()", 2, "module random", "before the loop"),
    "the time": ("t = time.time()\nh = model.layers[0].mlp.output", 1, "module time", "before the loop"),
    "the time in a function": ("kept.append(timed(model.layers[0].mlp.output))", 0, "module time", ""),
    "print": ("h = model.layers[0].mlp.output\nprint(h.shape)", 2, "print sends text", "after the loop"),
    "tracer.log": ("tracer.log('x')\nh = model.layers[0].mlp.output", 1, r"\.log sends text", "after the loop"),
    "a barrier": ("h = model.layers[0].mlp.output\nmeet()", 2, "meet is a Barrier", ""),
    "stop": ("h = model.layers[0].mlp.output\nif step == 2:\n    tracer.stop()", 3, r"\.stop ends", r"iter\[a:b\]"),
    "break": ("h = model.layers[0].mlp.output\nif step == 2:\n    break", 3, "break", r"iter\[a:b\]"),
    "while": ("h = model.layers[0].mlp.output\nwhile False:\n    pass", 2, "while", "range"),
    "try": ("try:\n    h = model.layers[0].mlp.output\nexcept ValueError:\n    pass", 1, "exceptions", "out of the loop"),
    "a with": ("with torch.enable_grad():\n    h = model.layers[0].mlp.output", 1, "context", "without"),
    "an import": ("import math\nh = model.layers[0].mlp.output", 1, "import", "before the loop"),
    "a class": ("class A: pass\nh = model.layers[0].mlp.output", 1, "class", "before the loop"),
    "del": ("h = model.layers[0].mlp.output\ndel h", 2, "del", ""),
    "getattr": ("h = getattr(model, 'layers')[0].mlp.output", 1, "looked up as text", "write the name"),
    "isinstance": ("h = model.layers[0].mlp.output\nx = isinstance(h, tuple)", 2, "type", ""),
    "text of a tensor": ("h = model.layers[0].mlp.output\ntable[f'{h}'] = 1", 2, "text of a tensor", "save"),
    "str of a tensor": ("h = model.layers[0].mlp.output\ntable['x'] = str(h)", 2, "text of a tensor", "save"),
    "data": ("model.layers[0].mlp.output.data[:] = 0", 1, r"\.data reaches", ""),
    "a gradient": ("model.layers[0].mlp.output.sum().backward()", 1, "gradients", "after the trace"),
    "in place into a tensor from before": (
        "h = model.layers[0].mlp.output\nstore[step] = h[0]",
        2,
        "from before the loop is changed in place",
        r"torch\.stack",
    ),
    "in place by a method": ("h = model.layers[0].mlp.output\nv.add_(h[0])", 2, "changed in place", "total = total"),
    "a late write": (
        "h = model.layers[0].mlp.output\ng = model.layers[1].mlp.output\nh[:] = g",
        3,
        "after the block went on",
        "clone",
    ),
    "out of order": ("g = model.layers[1].mlp.output\nh = model.layers[0].mlp.output", 2, "already passed", "order"),
    "a counter": ("h = model.layers[0].mlp.output\nlog['names'][0] = 'b'", 2, "replaced", "append"),
    "a number that changes": ("h = model.layers[0].mlp.output\nalpha = alpha + 1", 2, "alpha is a float", "tensor"),
    "a list that is read": ("kept.append(model.layers[0].mlp.output)\nx = kept[-1]", 2, "adds to this and reads", "previous"),
    "the length of a list": ("kept.append(model.layers[0].mlp.output)\nx = len(kept)", 2, "adds to this and reads", ""),
    "a stack of a list": ("kept.append(model.layers[0].mlp.output)\nx = torch.stack(kept)", 2, "TypeError", ""),
    "a function that appends": ("keep(model.layers[1].mlp.output, kept)", 1, "from before the loop is changed", "append"),
    "a list that loses": ("neurons.pop()\nh = model.layers[0].mlp.output", 1, "from before the loop is changed", "append"),
    "a sum that grows": (
        "total = torch.cat([total, model.layers[0].mlp.output])",
        1,
        r"total has shape \[2, 19\] in one step and \[3, 19\] in the next",
        r"torch\.cat it after the loop",
    ),
    "an object": ("h = model.layers[0].mlp.output\nx = object_of_mine", 2, "is a object", "before the loop"),
    "a function with state": ("kept.append(counted(model.layers[0].mlp.output))", 1, "attribute of a function", ""),
    "an applied module": ("h = model.layers[0].mlp.output\nkept.append(model.lm_head(h))", 2, "applies", "after the loop"),
    "a weight": ("h = model.layers[0].mlp.output\nkept.append(model.lm_head.weight[3])", 2, "weight", "before the loop"),
    "skip": ("model.layers[0].mlp.skip(v)", 1, r"\.skip", "assign"),
    "next": ("h = model.layers[0].mlp.next().output", 1, r"\.next", ""),
    "a cache": ("cache = tracer.cache()\nh = model.layers[0].mlp.output", 1, r"\.cache", "before the loop"),
    "the result": ("h = model.layers[0].mlp.output\nr = tracer.result", 2, r"\.result", "after the loop"),
    "a sample": ("model.samples.output[:] = 3", 1, "not been seen|sampled token", ""),
    "memory of nobody": ("h = model.layers[0].mlp.output\nh += torch.empty(19)", 2, "nobody wrote", "zeros"),
    "an unknown name": ("h = model.layers[0].mlp.output\nx = nowhere", 2, "nowhere is not bound", ""),
    "eval": ("h = eval('model').layers[0].mlp.output", 1, "made from text", "write"),
    "open": ("f = open('x')\nh = model.layers[0].mlp.output", 1, "files", "before"),
    "a tuple of the model": ("kept.append(model.layers[0].output.save())", 1, "tuple of the model", "one by one"),
    "a number beside a carried sum": ("total += model.layers[0].mlp.output\nkept.append(total)", 2, "kept", r"clone\(\)"),
    "a generator": ("def g():\n    yield 1\nh = model.layers[0].mlp.output", 2, "generator", "list"),
    "a nested loop over steps": ("for s in tracer.iter[:]:\n    pass", 1, "inside another", "top"),
}  # fmt: skip
BEFORE = "total = torch.zeros(2, 19)"


def plan_of(text: str, number: int = 0) -> Any:
    """Return the plan of a block's loop in step 1, where its code before the loop has run."""
    request = Request(text, names(number), number)
    request.begin()
    [region] = regions(request.unit)
    survey(region, request.names, SOURCES.get)
    return compile_region(region, request.names, frozenset(request.writes), 1, context())


def test_a_tensor_that_is_not_saved_is_left_where_it_is_used_or_other_blocks_see_it() -> None:
    body = "h = model.layers[0].mlp.output\na = (h * 2).save()\nb = [h, (h + 1).save()]\nc, d = (h, 3), {'x': [h]}\ne = step"
    request = Request(block(body, "", "print(c)"), names(0), 0)
    request.begin()
    [region] = regions(request.unit)
    for shared in ("", "d"):
        given = replace(context(), shared=frozenset(shared))
        plan = compile_region(region, request.names, frozenset(request.writes), 1, given)
        assert {name for name, _ in plan.results} == {"a", "b", "c", "e", "step"} | set(shared)
        assert set(plan.dropped) == {"h", "d"} - set(shared)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_line_and_what_to_write(name: str) -> None:
    body, line, what, instead = REFUSED[name]
    text = block(body, BEFORE)
    with pytest.raises(Refused, match=what) as refused:
        plan_of(text)
    found = refused.value
    expected = 19 if name == "the time in a function" else line + 3
    assert found.line == expected, (found.line, str(found))
    if instead:
        import re

        assert re.search(instead, found.instead), found.instead


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("for step in tracer.iter[:]:\n    pass\nelse:\n    pass\n", 4, "else"),
        ("for a, b in tracer.iter[:]:\n    pass\n", 1, "one name"),
        ("if True:\n    for s in tracer.iter[:]:\n        pass\n", 2, "inside another"),
        ("r = tracer.result\n", 1, "nothing before"),
    ],
)
def test_loops_that_are_no_plans(text: str, line: int, what: str) -> None:
    with pytest.raises(Refused, match=what) as refused:
        regions(unit(text))
    assert refused.value.line == line
