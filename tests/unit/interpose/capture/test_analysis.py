"""`analysis.py` against Python itself: what programs look up and bind when they really run."""

from __future__ import annotations

import ast
import random

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from interpose.capture import GUARD, block_reads_writes, compile_block
from tests.unit.interpose.capture.random_programs import random_program

EXAMPLES = [
    ("x = y; z = x", "y", "x z"),
    ("x += 1", "x", "x"),
    ("x[i] = v; o.a = 1", "v x i o", ""),
    ("if c: x = 1\nelse: x = 2\nx", "c", "x"),
    ("if c: x = 1\nx", "c x", "x"),
    ("if c: raise E\nelse: x = 1\nx", "c E", "x"),
    ("for i in s:\n  x = 1\nx", "s x", "i x"),
    ("for i in range(3):\n  x = 1\nx", "range", "i x"),
    ("for i in [a, b]:\n  if i: break\n  x = 1\nx", "a b x", "i x"),
    ("for s in tracer.iter[:]:\n  x = s\nx", "tracer", "s x"),
    ("with tracer.all() as s:\n  x = s\nx", "tracer", "s x"),
    ("while True:\n  x = 1\n  if x: break\nx", "", "x"),
    ("while c:\n  x = 1\nelse:\n  y = 1\nx; y", "c x", "x y"),
    ("for i in s:\n  try: del x\n  except: pass\n  x = 1", "s x", "i x"),
    ("try:\n  x = f()\nexcept E as e:\n  x = 1\nx; e", "f E e", "x e"),
    ("try:\n  x = f()\nexcept E:\n  pass\nelse:\n  y = x\nfinally:\n  z = 1\nx; y; z", "f E x y", "x y z"),
    ("with open(p) as f:\n  x = f\nx", "open p", "f x"),
    ("with suppress(E):\n  x = 1\nx", "suppress E x", "x"),
    ("import a.b, c as d\nfrom e import f\na; d; f", "", "a d f"),
    ("[x for x in s if x]; x", "s x", ""),
    ("[(y := x) for x in s]; y", "s y", "y"),
    ("{k: v for k, v in s for w in k if w}", "s", ""),
    ("f = lambda a, b=c: a + b + d", "c d", "f"),
    ("def f(a, b=c):\n  e = a\n  return e + g + f(b)", "c g", "f"),
    ("def f():\n  nonlocal n\n  n += 1", "n", "f n"),
    ("def f():\n  n = 0\n  def g():\n    nonlocal n\n    n += m\n  return g", "m", "f"),
    ("class A(B):\n  a = 1\n  def f(self): return a, self.a\n  c = a", "B a", "A"),
    ("x: T = 1\ny: U", "", "x"),
    ("def f(a: T) -> U: ...", "", "f"),
    ("a and (x := 1); x", "a x", "x"),
    ("(x := 1) and a; x", "a", "x"),
    ("x = 1 if (c := d) else c; x", "d", "c x"),
    ("del x; x", "x", ""),
    ("x = 1\ndel x\nx", "x", "x"),
    ("f'{a!r:{w}}'", "a w", ""),
    (
        "match v:\n  case {'k': p, **r} if p: pass\n  case C(a=1) | m.n: p = r = 1\n  case _: p = r = 2\np; r",
        "v C m",
        "p r",
    ),
    ("match v:\n  case [p, *q]: x = p\nx", "v x", "p q x"),
    ("global x\nx = 1", "", "x"),
    ("(*a, b), c = v", "v", "a b c"),
    ("async def f():\n  async with a as b:\n    return [c async for c in d]", "a d", "f"),
]


@pytest.mark.parametrize(("text", "reads", "writes"), EXAMPLES)
def test_examples(text: str, reads: str, writes: str) -> None:
    found = block_reads_writes(ast.parse(text).body)
    assert [set(names) for names in found] == [set(reads.split()), set(writes.split())]


class Names(dict):
    """The namespace of a program: what it looked up in vain, and what it bound."""

    def __init__(self, names: dict[str, object]) -> None:
        super().__init__(names)
        self.missed: set[str] = set()
        self.bound: set[str] = set()

    def __missing__(self, name: str) -> object:
        self.missed.add(name)
        raise KeyError(name)

    def __setitem__(self, name: str, value: object) -> None:
        self.bound.add(name)
        super().__setitem__(name, value)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
@example(7138)  # a class in a class, which does not see the names of the outer one
def test_sound(seed: int) -> None:
    """Names that a program looks up before it binds them are reads; names that it binds are writes."""
    text = random_program(random.Random(seed))
    note(text)
    reads, writes = block_reads_writes(ast.parse(text).body)
    names = Names({GUARD: lambda: None})
    try:
        exec(compile_block(text, "program", 1, 0), names)
    except Exception:
        pass
    assert names.missed & set("abcde") <= set(reads)
    assert names.bound & set("abcde") <= set(writes)


def test_what_follows_a_block_that_only_raises() -> None:
    """The block of an invoke does not run where it stands, so what follows it is reached."""
    source = "with tracer.invoke():\n    raise ValueError\nwith tracer.invoke():\n    good = model\n"
    reads, writes = block_reads_writes(ast.parse(source).body)
    assert set(reads) == {"tracer", "ValueError", "model"}
    assert writes == ("good",)
