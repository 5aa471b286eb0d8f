"""Functions, modules and variables of a notebook's own: what travels, and what two pieces of code cannot share."""

from __future__ import annotations

import importlib
import linecache
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import interpose
from tests.engine.shipping.worker import Shipped

FILES = {
    "mylib/__init__.py": "from mylib import inner\nSCALE = 3\n\ndef scaled(x):\n    return x * SCALE + inner.shift(x)\n",
    "mylib/inner.py": """
        import threading
        import mylib
        LOCK = threading.Lock()
        OFFSET = 10
        def shift(x):
            return x + OFFSET
        def back(x):
            return mylib.SCALE - x
        def locked():
            with LOCK:
                return 1
        class Probe:
            def __init__(self, k):
                self.k = k
            def __call__(self, x):
                return shift(x) * self.k
        """,
}


@pytest.fixture
def mylib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package beside the notebook, which no server has."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("mylib")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylib"]:
        del sys.modules[name]


def run(text: str, **names: Any) -> dict[str, Any]:
    """Run a cell."""
    text = textwrap.dedent(text)
    name = f"<cell {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    namespace: dict[str, Any] = {"__name__": "__main__", "Shipped": Shipped, **names}
    exec(compile(text, name, "exec"), namespace)
    return namespace


def refusal(text: str, **names: Any) -> str:
    with pytest.raises(interpose.InvalidArgument) as caught:
        run(text, **names)
    return str(caught.value)


def test_a_module_of_the_notebooks_travels_as_far_as_it_is_used(mylib: ModuleType) -> None:
    probe = mylib.inner.Probe(2)
    with Shipped() as tracer:
        found = [mylib.scaled(2), mylib.SCALE, mylib.inner.back(1), mylib.inner.Probe(3)(1), probe(1)].save()
        same = [isinstance(probe, mylib.inner.Probe)].save()
    assert found == [18, 3, 2, 33, 22] and same == [True]
    sent = tracer.trace.SerializeToString()
    assert b"locked" not in sent and b"def shift" in sent


def test_what_cannot_travel_of_a_module(mylib: ModuleType) -> None:
    assert "inner.locked: locked uses 'LOCK'" in refusal("with Shipped():\n    mylib.inner.locked()", mylib=mylib)
    assert "line 3 uses the module itself" in refusal("with Shipped():\n    1\n    getattr(mylib, 'x')", mylib=mylib)
    assert "uses the module itself" in refusal("with Shipped():\n    mylib.SCALE = 4", mylib=mylib)
    assert "mylib.inner is yours" in refusal("with Shipped():\n    x = [mylib.inner]", mylib=mylib)
    assert "no attribute 'nothing'" in refusal("with Shipped():\n    mylib.nothing", mylib=mylib)


SHARED = [
    # what the function assigns and the block reads, or another function does
    (
        "n = 0\ndef f():\n    global n\n    n += 1\nwith Shipped():\n    f()\n    x = [n].save()",
        "f assigns 'n', which the block",
    ),
    (
        "n = 0\ndef f():\n    global n\n    n += 1\ndef g():\n    return n\nwith Shipped():\n    f()\n    x = g()",
        "function g uses",
    ),
    (
        "class A:\n    def f(self):\n        global n\n        n = 1\na = A()\ndef g():\n    return n\nwith Shipped():\n"
        "    a.f()\n    x = g()",
        "the class A assigns 'n'",
    ),
    (
        "def make():\n    n = 0\n    def f():\n        nonlocal n\n        n += 1\n    def g():\n        return n\n"
        "    return f, g\nf, g = make()\nwith Shipped():\n    f()\n    x = g()",
        "f assigns 'n', which the function g",
    ),
    (
        "def t():\n    n = 0\n    def f():\n        nonlocal n\n        n += 1\n    with Shipped():\n        f()\n"
        "        x = [n].save()\nt()",
        "f assigns 'n', which the block",
    ),
    # what the block assigns and a function reads
    (
        "k = 1\ndef f(x):\n    return x * k\nwith Shipped():\n    k = 2\n    x = f(1)",
        "the block assigns 'k', which the function f",
    ),
    (
        "def t():\n    k = 1\n    f = lambda x: x * k\n    with Shipped():\n        k = 2\n        x = f(1)\nt()",
        "the block assigns 'k', which",
    ),
]


@pytest.mark.parametrize("case", range(len(SHARED)))
def test_a_variable_that_would_be_two(case: int) -> None:
    text, message = SHARED[case]
    found = refusal(text)
    assert message in found and "in a list or a dict" in found


def test_variables_that_stay_one() -> None:
    found = run("""
        n = 0
        total = []
        def alone():
            global n
            n += 1
            return n
        def counter():
            k = 10
            def count():
                nonlocal k
                k += 1
                return k
            return count
        first, second = counter(), counter()
        def note(x):
            total.append(x)
        def local(k):
            for i in range(k):
                pass
            return i
        with Shipped():
            i = 7
            note(1)
            note(2)
            found = [alone(), alone(), first(), first(), second(), total, local(3), i].save()
        """)["found"]
    assert found == [1, 2, 11, 12, 11, [1, 2], 2, 7]


def test_functions_of_several_kinds() -> None:
    found = run("""
        import functools
        def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        def generate(n):
            for i in range(n):
                got = yield i
        async def later(x): return x
        add = lambda *args, k=[1], **more: sum(args) + k[0] + len(more)
        tools = {"add": add, "nested": [fib]}
        def outer(fn):
            def inner(*args):
                return fn(*args) + 1
            return inner
        @outer
        def wrapped(x): return x
        with Shipped():
            coroutine = later(5)
            try:
                coroutine.send(None)
            except StopIteration as stop:
                value = stop.value
            found = [fib(7), even(4), list(generate(2)), value, add(1, 2, z=3), tools["nested"][0](5), wrapped(1),
                     functools.reduce(add, [1, 2])].save()
        """)["found"]
    assert found == [13, True, [0, 1], 5, 5, 5, 2, 4]
