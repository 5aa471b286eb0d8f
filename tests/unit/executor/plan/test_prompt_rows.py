"""Whether a block asks for nothing of its prompt's rows is read off its text; what is not known is no proof."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from executor.plan.prompt_rows import ASKS, LONG, MOST_TEXT, OTHERS, asked_of_prompt
from interpose.capture.analysis import block_reads_writes
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Items, Tensor, Value

NAMES = {
    "model": Value(module=""),
    "layers": Value(module="model.layers"),
    "tracer": Value(tracer=True),
    "torch": Value(python_module="torch"),
    "mine": Value(python_module="mine"),
    "two": Value(integer=2),
    "zero": Value(integer=0),
    "vector": Value(ref=0),
    "kept": Value(ref=1),
    "thing": Value(ref=2),
}
LATER = "for step in tracer.iter[1:]:\n    model.layers[0].output[:] += vector\n"
ANY = "h = model.layers[0].output\n"


def trace_of(*texts: str, **fields: Any) -> pb.Trace:
    trace = pb.Trace(**fields)
    trace.scope.values.extend([Value(tensor=Tensor()), Value(list=Items()), Value(instance={})])
    for text in texts:
        reads, writes = block_reads_writes(ast.parse(text).body)
        program = pb.Program(source=text, filename="<cell>", first_line=1, writes=writes)
        program.reads.extend(Binding(name=name, value=NAMES[name]) for name in reads if name in NAMES)
        trace.invokes.append(pb.Invoke(program=program))
    return trace


@pytest.mark.parametrize(
    "text",
    [
        "",
        "'Nothing.'\npass\n",
        "logits = model.logits.output.save()\n" + ANY,
        "token = model.samples.output.item()\n",
        "model.logits.output[:, 3] = -100.0\n",
        "model.logits.output[:] *= two\n",
        "model.logits.output += vector\n",
        "model.samples.output = vector\n",
        "model.logits.output = torch.zeros(3) if model.logits.output is None else vector\n".replace(
            "torch.zeros(3) if model.logits.output is None else ", ""
        ),
        "kept.append(model.logits.output.save())\n",
        "chances = torch.softmax(model.logits.output, dim=-1)[0, two].save()\n",
        "import torch.nn.functional as F\nchances = F.softmax(model.logits.output, -1)\n",
        "print(model.logits.output.argmax())\n",
        "both = [model.logits.output, model.samples.output]\n",
        "sizes = [row.norm() for row in model.logits.output]\n",
        "if model.logits.output.argmax() == 3:\n    tracer.stop()\n",
        "result = tracer.result.save()\n" + ANY,
        LATER,
        LATER + ANY,
        "lists, more = [], [].save()\nscale = -0.5 * two\nscale += 1\n" + LATER,
        LATER.replace("[1:]", "[two:]"),
        LATER.replace("[1:]", "[1:9:3]"),
        LATER.replace("[1:]", "[3]"),
        LATER.replace("for step in tracer.iter[1:]", "with tracer.iter[1:]"),
        "for step in tracer.iter[:]:\n    if step == 0:\n        continue\n    " + ANY,
        "for step in tracer.all():\n    if step > 0:\n        " + ANY,
        "for step in tracer.iter[:]:\n    if not step:\n        pass\n    else:\n        " + ANY,
        "for step in tracer.iter[:]:\n    kept.append(model.logits.output.save())\n    " + ANY,
        "for step in tracer.iter[:two]:\n    kept.append(step)\n" + ANY,
        "for step in tracer.iter[0]:\n    pass\nlogits = model.logits.output\n",
    ],
)
def test_blocks_that_ask_for_nothing(text: str) -> None:
    assert asked_of_prompt(trace_of(text), 0) is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (ANY, 1),
        ("h = layers[0].output\n", 1),
        ("logits = model.lm_head.output\n", 1),
        ("h, logits = model.layers[0].output, model.logits.output\n", 1),
        ("pair = torch.stack([model.layers[0].output, model.logits.output])\n", 1),
        ("kept.append(model.layers[0].output)\n", 1),
        ("model.layers[0].output[:] = model.samples\n", 1),
        ("model.layers[0].output += vector\n", 1),
        ("m = model\nlogits = m.logits.output\n", 2),
        ("cache = tracer.cache()\nlogits = model.logits.output\n", 1),
        ("model.layers[0].mlp.skip(vector)\n", 1),
        ("pass\nmodel.logits.next()\n", 2),
        ("thing.save()\n", 1),
        ("thing.append(model.logits.output)\n", 1),
        ("thing + vector\n", 1),
        ("vector += thing\nlogits = model.logits.output\n", 1),
        ("thing[0] = 1\n", 1),
        ("thing()\n", 1),
        ("mine.value\n", 1),
        ("import mine\n", 1),
        ("from torch import *\n", 1),
        ("from . import torch\n", 1),
        ("list = thing\nmade = list()\n", 2),
        ("def ask():\n    return model.layers[0].output\nh = [ask(), model.logits.output]\n", 1),
        ("while True:\n    break\n", 1),
        ("try:\n    h = model.layers[0].output\nexcept Exception:\n    pass\n", 1),
        ("with torch.no_grad():\n    h = model.layers[0].output\n", 1),
        ("if thing:\n    pass\n", 1),
        ("if vector:\n    pass\n", 1),
        ("for i in range(2):\n    h = model.layers[i].output\n", 1),
        ("for step in thing.iter[1:]:\n    pass\n" + ANY, 1),
        ("tracer = thing\n" + LATER, 2),
        ("model = thing\nlogits = model.logits.output\n", 2),
        ("x = tracer\ntracer = thing\n" + LATER, 2),
        (LATER.replace("[1:]", "[:]"), 2),
        (LATER.replace("[1:]", "[zero:]"), 2),
        (LATER.replace("[1:]", "[3:1]"), 1),
        (LATER.replace("[1:]", "[-1:]"), 1),
        (LATER.replace("[1:]", "[thing:]"), 1),
        ("two = zero\n" + LATER.replace("[1:]", "[two:]"), 2),
        (LATER.replace("[1:]", "[1:][0]"), 1),
        ("for step in tracer.iter[:]:\n    step = 1\n    if step:\n        h = model.layers[0].output\n", 3),
        ("for step in tracer.iter[:]:\n    if step == 0:\n        break\n" + ANY, 3),
        ("for step in tracer.iter[:1]:\n    pass\n" + ANY, 3),
        ("for step in tracer.iter[0]:\n    kept.append(step)\nelse:\n    h = model.layers[0].output\n", 4),
        ("for kept[0] in tracer.iter[:]:\n    pass\n", 1),
    ],
)
def test_blocks_that_may_ask_for_something(text: str, line: int) -> None:
    asked = asked_of_prompt(trace_of(text), 0)
    assert asked is not None and (asked.why, asked.line) == (ASKS, line)


def test_a_block_beside_others() -> None:
    text = "kept.append(model.logits.output)\n"
    assert asked_of_prompt(trace_of(text, LATER), 0) is None
    for fields in ({"edits": ["a"]}, {"applied": [pb.Edit(name="a")]}, {"exchanged": ["kept"]}):
        asked = asked_of_prompt(trace_of(text, **fields), 0)
        assert asked is not None and asked.why == OTHERS
    for field, value in (("joint", True), ("gang", True)):
        trace = trace_of(text, LATER)
        setattr(trace.invokes[1], field, value)
        assert asked_of_prompt(trace, 0) is not None
    trace = trace_of(text, LATER)
    trace.invokes[1].after.append(0)
    assert asked_of_prompt(trace, 0) is None and asked_of_prompt(trace, 1) is not None


def test_names_that_others_may_bind_again() -> None:
    """A shared name that another invoke assigns, and a variable of the session's, may be bound to anything."""
    text = "kept.append(model.logits.output)\n"
    shared = [Binding(name="kept", value=NAMES["kept"])]
    assert asked_of_prompt(trace_of(text, LATER, shared=shared), 0) is None
    asked = asked_of_prompt(trace_of(text, "kept = thing\n", shared=shared), 0)
    assert asked is not None and asked.line == 1
    variable = [pb.SessionVariable(id="v", entry=1)]
    assert asked_of_prompt(trace_of(text, variables=variable), 0) is not None


def test_texts_that_are_not_looked_at() -> None:
    for text in ("x = 1\n" * (MOST_TEXT // 6 + 1), "x = " + "-" * 5000 + "1\n", "def\n"):
        trace = trace_of("")
        trace.invokes[0].program.source = text
        asked = asked_of_prompt(trace, 0)
        assert asked is not None and asked.why in (LONG, ASKS)
