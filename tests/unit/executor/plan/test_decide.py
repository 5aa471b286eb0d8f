"""Loops that decide on values are plans that give what the greenlet gives, or they are refused."""

from __future__ import annotations

import random
import re
import textwrap

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from executor.plan.refuse import Refused
from tests.unit.executor.plan.bench import both
from tests.unit.executor.plan.test_cases import block, names, plan_of
from tests.unit.executor.plan.test_random import FLAGS, Author

H = "h = model.layers[1].mlp.output\n"

# A name, the body of the loop, what stands before it, what stands after it.
DECIDED = {
    "a change where a norm is large": (
        "h = model.layers[1].output[0]\nif float(h.norm()) > 2.2:\n    h[:] += v",
        "",
        "",
    ),
    "at every layer": ("for layer in model.layers:\n    h = layer.output[0]\n    if h[0, 3] > 0:\n        h[:] += v", "", ""),
    "both ways": (H + "if h.sum() > 0:\n    h *= 0.5\nelse:\n    h[:] -= v", "", ""),
    "one of three ways": (
        H + "n = h[0, 0].item()\nif n > 0.2:\n    h *= 0.5\nelif n > -0.2:\n    h += v\nelse:\n    h[:] = 0",
        "",
        "",
    ),
    "a way in a way": (
        H + "if h.sum() > 0:\n    if h[0, 0] > 0:\n        h += v\n    else:\n        h -= v\n    h *= 2",
        "",
        "",
    ),
    "a name": (H + "x = h * 2\nif h.sum() > 0:\n    x = h * 3\nkept.append(x.save())", "", ""),
    "a name of two ways": (H + "if h.sum() > 0:\n    x = h * 3\nelse:\n    x = h + 1\nkept.append(x.save())", "", ""),
    "a carried tensor": (
        H + "if h[0, 1] > 0:\n    total = total + h",
        "total = torch.zeros(1, 19)",
        "total = total.save()",
    ),
    "a carried tensor in place": (H + "if h[0, 1] > 0:\n    total += h[0]", "total = torch.zeros(19).save()", ""),
    "a flag": (
        "if hot > 0:\n    model.layers[0].mlp.output[:] += v\n" + H + "hot = (h.sum() > 0).float()",
        "hot = torch.zeros(())",
        "",
    ),
    "a later location": (
        "n = float(model.layers[0].mlp.output[0, 0])\nif n > 0:\n    model.layers[2].output[0][:] += v\n"
        "kept.append(model.logits.output.save())",
        "",
        "",
    ),
    "the stream": ("if model.layers[1].resid_post.sum() > 0:\n    model.layers[1].resid_post += v", "", ""),
    "the stream by a name": ("r = model.layers[1].resid_post\nif r.sum().item() > 0:\n    r += v", "", ""),
    "the stream is assigned": (
        "r = model.layers[1].resid_post\nif r.sum() > 0:\n    model.layers[1].resid_post = r * 0.5\n"
        "kept.append(model.layers[1].resid_post.save())",
        "",
        "",
    ),
    "the stream, changed before": (
        "r = model.layers[1].resid_post\nr += v\nif r.sum() > 0:\n    r *= 0.5\nr -= 1\nkept.append(r.save())",
        "",
        "",
    ),
    "a part of a projection": ("q = model.layers[1].attn.qkv.q\nif q[0, 0] > 0:\n    q[:, :4] *= 2", "", ""),
    "an expression": (H + "h[:] = h * 2 if h.sum() > 0 else h + v", "", ""),
    "an expression in a comprehension": (
        H + "kept.append([x * 2 if x.sum() > 0 else x - 1 for x in (h, h * -1)])",
        "",
        "",
    ),
    "and, or, not": (H + "if h.sum() > 0 and not h[0, 0] > 0.1 or h[0, 1] < 0:\n    h += v", "", ""),
    "the step and a value": (H + "if step % 2 and h.sum() > 0:\n    h += v", "", ""),
    "a value and the step": (H + "if h.sum() > 0 or step > 3:\n    h += v", "", ""),
    "arithmetic": (
        H + "a = float(h.norm()) * 0.5 - 1\nif abs(a) > 0.1 and -a < 1 and 1 - a >= 0.25 * a:\n    h += v",
        "",
        "",
    ),
    "a chain of comparisons": (
        H + "if -2 < h.sum() < 2 and 0 <= step < 4:\n    h += v\n"
        "if h[0, 0].item() < h[0, 1].item() < 1 != h[0, 2].item():\n    h *= 2",
        "",
        "",
    ),
    "integers": (H + "if h.argmax().item() > 9 and int((h > 0).sum()) != 8:\n    h += v", "", ""),
    "a float of a bool": (H + "if float(h.sum() > 0) == 1:\n    h += v", "", ""),
    "a name in the test": (H + "if (n := h.sum().item()) > 0:\n    h += v\nkept.append(n)", "", ""),
    "the condition is changed": (H + "c = h.sum() > 0\nif c:\n    c.fill_(False)\n    h += v\nkept.append(c)", "", ""),
    "a number of a moment": (H + "n = h[0, 0].item()\nh += 1\nif n > 0:\n    h += v\nkept.append(n)", "", ""),
    "a chosen number": (
        H + "n = h[0, 0].item()\nif h.sum() > 0:\n    n = h[0, 1].item()\nkept.append((n, n > 0))",
        "",
        "",
    ),
    "functions": (H + "if twice(h).sum() > 0:\n    h[:] = damped(h)", "", ""),
    "a loop in a way": (H + "if h.sum() > 0:\n    for i in neurons:\n        h[:, i] = 0", "", ""),
    "no_grad": (H + "with torch.no_grad():\n    if h.sum() > 0:\n        h += v", "", ""),
    "a list of numbers": (H + "kept.append(float(h.norm()))\nkept.append((h.argmax().item(), bool(h.sum() > 0)))", "", ""),
    "a dict of numbers": (H + "table[step] = h[0, 0].item()\ntable[step, h.argmax().item()] = 1", "", ""),
    "the last number": (H + "last = h.sum().item()", "", "got = [last].save()"),
    "a list in the step that no way changes": (
        H + "mine = [h * 2]\nif h.sum() > 0:\n    h += mine[0]\nkept.append(mine[0].clone())",
        "",
        "",
    ),
    "a list that grows at times": (H + "if h.sum() > 0:\n    kept.append(h.clone())\nelse:\n    kept.append(step)", "", ""),
    "a list that grows at times, with what changes": (
        H + "if h[0, 0] > 0:\n    kept.append((h, h[0, 1].item()))\n    if h[0, 1] > 0:\n        kept += [h * 2]\nh += v",
        "",
        "",
    ),
    "a dict that grows at times": (H + "if h.sum() > 0:\n    table[step] = h.argmax().item()\nkept.append(step)", "", ""),
    "torch's functions in place": (H + "if h.sum() > 0:\n    h.mul_(2).clamp_(-1, 1)\n    h[:, :4].zero_()", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_a_plan_decides_as_the_greenlet_does(name: str) -> None:
    body, before, after = DECIDED[name]
    both(block(body, before, after), names)


# A name, the body of the loop, the line in it (counted from 1), and a part of the reason.
REFUSED = {
    "a save": (H + "if h.sum() > 0:\n    x = (h * 2).save()", 3, "saved where a value decides"),
    "an assigned output": (H + "if h.sum() > 0:\n    model.layers[1].mlp.output = h * 2", 2, "assigned where a value"),
    "an assigned item": ("o = model.layers[1].output\nif o[0].sum() > 0:\n    o[0] = o[0] * 2", 2, "assigned where a value"),
    "an assigned output, and on": (
        H + "if h.sum() > 0:\n    model.layers[1].mlp.output = h * 2\n    x = model.layers[2].mlp.output",
        4,
        "assigned where a value",
    ),
    "a list of the step": (H + "mine = []\nif h.sum() > 0:\n    mine.append(h)", 3, "gets another item"),
    "a dict of the step": (H + "mine = {'x': [1]}\nif h.sum() > 0:\n    mine['x'][0] = 2", 3, "gets another item"),
    "a list of a function": (
        H + "def make():\n    held = []\n    return lambda x: held.append(x)\nput = make()\nif h.sum() > 0:\n    put(h)",
        6,
        "gets another item",
    ),
    "an argument of the model": (
        "a, k = model.layers[1].inputs\nif a[0].sum() > 0:\n    k['residual'] = a[1]",
        2,
        "another item|assigned where a value",
    ),
    "another name, changed": (H + "x = h * 1\nif h.sum() > 0:\n    x = h\nx += 1", 5, "between which a value decided"),
    "another name, and its tensor": (
        H + "x = v.expand(1, 19).clone()\nif h.sum() > 0:\n    x = h\nh += 1\nkept.append(x)",
        5,
        "between which a value decided",
    ),
    "values of two kinds": (H + "if h.sum() > 0:\n    x = 1\nelse:\n    x = 2\nkept.append(x)", 2, "decides what x is"),
    "a name of one way": (H + "if h.sum() > 0:\n    x = h * 2\nkept.append(x)", 3, "x is not bound"),
    "a name of one way, after the loop": (H + "if h.sum() > 0:\n    last = h * 2", 2, "decides what last is"),
    "a name that was None": (H + "if best is None:\n    x = 1\nif h.sum() > 0:\n    best = h * 2", 4, "decides what best is"),
    "tensors of two shapes": (H + "x = h\nif h.sum() > 0:\n    x = h[0]\nkept.append(x)", 3, "decides what x is"),
    "a number beside a tensor": (H + "h *= float(h.norm())", 2, "taken out of the tensors"),
    "the text of a number": (H + "table[f'{float(h.sum()):.2f}'] = 1", 2, "taken out of the tensors"),
    "a rounded number": (H + "n = int(h.sum())\nkept.append(n)", 2, "rounds"),
    "a division by a number": (H + "if 1 / float(h.sum()) > 2:\n    h += v", 2, "unsupported|taken out"),
    "a power": (H + "if float(h.sum()) ** 2 > 2:\n    h += v", 2, "unsupported|taken out"),
    "Python's sum": (H + "kept.append(sum([float(h.norm()), float(h.sum())]))", 2, "taken out of the tensors"),
    "a name of Python's": (H + "if h.sum() > 0:\n    max = h * 2\nx = max(2, 3)", 2, "of Python's has this name"),
    "a sum of integers": (H + "kept.append(h.argmax().item() + 1)", 2, "taken out of the tensors"),
    "a large integer": (H + "if float(h.sum()) > 10 ** 17:\n    h += v", 2, "taken out of the tensors"),
    "identity": (H + "x = v.expand(1, 19) * 1\nif h.sum() > 0:\n    x = h\nif x is h:\n    h += v", 5, "identity"),
    "identity in a function": (
        "def same(a, b):\n    return a is b\n" + H + "if h.sum() > 0:\n    h += v\nkept.append(same(h, h))",
        4,
        "identity",
    ),
    "a truth outside of a decision": (H + "x = h.sum() > 0 and step\nkept.append(x)", 2, "takes a value"),
    "a way that goes on": (
        "for i in (0, 1):\n    h = model.layers[i].mlp.output\n    if h.sum() > 0:\n        continue",
        3,
        "takes a value",
    ),
    "a decision in a function": (
        "def f(x):\n    if x.sum() > 0:\n        return 1\n    return 2\n" + H + "kept.append(f(h))",
        2,
        "takes a value",
    ),
    "an index where a value decides": (H + "if h.sum() > 0:\n    h[:, index] = 0", 3, "where a value decides"),
    "a gathered index": (H + "if h.sum() > 0:\n    h[:] = h.gather(1, h.argmax(-1, keepdim=True))", 3, "where a value decides"),
    "an integer division": (H + "n = h.argmax()\nif n > 0:\n    n = 7 // n", 4, "where a value decides"),
    "an earlier location in the other way": (
        H + "if h.sum() > 0:\n    model.layers[2].mlp.output *= 2\nelse:\n    model.layers[1].output[0][:] *= 2",
        5,
        "already passed",
    ),
    "an iterator": (
        H + "many = (x for x in (h, v))\nif h.sum() > 0:\n    for x in many:\n        h += x",
        3,
        "a generator stands",
    ),
    "the stream, and its part": (
        "a, b = model.layers[1].output\nr = model.layers[1].resid_post\nif r.sum() > 0:\n    r += v\nkept.append(b * 1)",
        5,
        "a part of the residual stream",
    ),
    "many elements": (H + "if h > 0:\n    h += v", 2, "out of a tensor that is none"),
    "metadata in place": (H + "x = h.clone()\nif h.sum() > 0:\n    x.t_()", 4, "where a value decides"),
    "an output argument": (H + "x = h.clone()\nif h.sum() > 0:\n    torch.add(h, 1, out=x)", 4, "where a value decides"),
    "a name of the plans": ("__interpose_ways__ = 3\n" + H, 0, "is the plans' own"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_way_can_have_is_refused(name: str) -> None:
    body, line, what = REFUSED[name]
    with pytest.raises(Refused) as refused:
        plan_of(block(body, "best = None\nlast = None", "print(last)"))
    assert re.search(what, str(refused.value)), str(refused.value)
    assert refused.value.line == line + 4, str(refused.value)


class Chooser(Author):
    """Writes a loop's body whose changes depend on values."""

    def statement(self, name: str, place: str) -> str:
        value, source = self.value(name), self.source
        if source.random() < 0.3:
            return super().statement(name, place)
        inside = [
            f"{name}[:] = {value}",
            f"{name}[:, :4] *= 0.5",
            f"{name}.mul_(0.5)",
            f"{name} += {value}",
            f"total = total + ({value}).sum()",
            f"peak = torch.maximum(peak, ({value}).max())",
            f"seen += ({value}).mean()",
            f"extra = ({value}) * 2",
            f"kept.append({value})",
            f"kept.append(({value}).sum().item())",
            f"table[step, {self.count}, '{source.random()}'] = ({value})[:, :5]",
        ]
        test = source.choice(
            [
                f"({value})[0, 2] > 0",
                f"float(({value}).sum()) < 0.5",
                f"({value})[0, 0].item() * 2 - 1 <= {name}[0, 1].item()",
                f"({value}).argmax().item() > 7",
                f"step % 2 == 0 and {name}[0, 5] > 0",
                f"{name}[0, 5] > 0 or not {name}[0, 6] > 0",
                "total > 0",
            ]
        )
        ways = []
        for head in (f"if {test}:", "else:")[: source.randint(1, 2)]:
            lines = "\n".join(source.choice(inside) for _ in range(source.randint(1, 2)))
            if source.random() < 0.2:
                lines = f"if {name}[0, 7] < 0:\n{textwrap.indent(lines, '    ')}"
            ways.append(f"{head}\n{textwrap.indent(lines, '    ')}")
        return f"extra = ({value}) * 1\n" + "\n".join(ways) + "\nkept.append(extra.sum().item())"


@settings(max_examples=20, **FLAGS)
@given(st.randoms(use_true_random=False))
def test_random_decisions(source: random.Random) -> None:
    before = "total, peak, seen = torch.zeros(()), torch.zeros(()), torch.zeros(()).save()"
    text = block(Chooser(source).body(), before, "total.save(), peak.save()\nended = [total, peak, len(kept)].save()")
    note(text)
    both(text, names, requests=3, steps=6)
