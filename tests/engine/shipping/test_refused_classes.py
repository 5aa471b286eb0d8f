"""Classes and objects that cannot be sent are refused where they are; what a hostile client makes of them harms nobody."""

from __future__ import annotations

import collections
import linecache
import textwrap
from typing import Any

import pytest
import torch

import interpose
from tests.engine.shipping.test_classes import Linked, Plain
from tests.engine.shipping.worker import LIMITS, Shipped, altered


def refusal(text: str, **names: Any) -> str:
    """The message with which a block is refused that uses `it`."""
    source = "with Shipped():\n    x = it\n"
    linecache.cache["<uses it>"] = (len(source), None, source.splitlines(True), "<uses it>")
    cell = textwrap.dedent(text)
    name = f"<cell {abs(hash(text))}>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    namespace: dict[str, Any] = {"__name__": "__main__", "Shipped": Shipped, **names}
    exec(compile(cell, name, "exec"), namespace)
    with pytest.raises(interpose.InvalidArgument) as caught:
        exec(compile(source, "<uses it>", "exec"), namespace)
    assert "x = it" in str(caught.value)
    return str(caught.value)


def test_refusals() -> None:
    assert "no source" in refusal("it = type('It', (), {})")
    assert "'lock'" in refusal(
        "import threading\nclass It:\n    lock = threading.Lock()\n    def f(self): ...\nit = It()"
    )
    assert ".parts['a']" in refusal("class It:\n    def f(self): ...\nit = It()\nit.parts = {'a': iter([])}")
    gone = "def make():\n    k = 2\n    class It:\n        if k: x = 1\n        def f(self): ...\n    return It\nit = make()"
    assert "'k', a variable that is gone" in refusal(gone)
    hooked = torch.nn.Linear(1, 1)
    hooked.register_forward_hook(lambda *_: None)
    assert "handle.remove()" in refusal("", it=hooked)
    huge = f"class It:\n    def f(self): return '{'x' * LIMITS.max_program_bytes}'\nit = It"
    assert "bytes of source" in refusal(huge)


def test_a_class_whose_text_has_changed_is_refused() -> None:
    text = "class It:\n    def f(self):\n        return 1\nit = It()\n"
    changed = text.replace("return 1", "return 2")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<edited>", "exec"), namespace)
    linecache.cache["<edited>"] = (len(changed), None, changed.splitlines(True), "<edited>")
    assert "no source" in refusal("", it=namespace["it"])


def test_a_class_statement_that_does_not_end() -> None:
    def endless(value: Any) -> None:
        if value.WhichOneof("kind") == "class_source":
            value.class_source.source = "class Plain:\n    while True: pass\n"

    with pytest.raises(interpose.InterposeError, match="longer than"), altered(endless, 0.3):
        x = Plain


def test_a_class_statement_that_raises() -> None:
    def raising(value: Any) -> None:
        if value.WhichOneof("kind") == "class_source":
            value.class_source.source = "class Plain:\n    1 / 0\n"

    with pytest.raises(interpose.InterposeError, match="ZeroDivisionError"), altered(raising):
        x = Plain


@pytest.mark.parametrize("name", ["int", "type", "len", "memoryview", "object"])
def test_objects_of_types_that_are_more_than_their_attributes(name: str) -> None:
    plain = Plain(1)

    def other_type(value: Any) -> None:
        if value.WhichOneof("kind") == "instance":
            value.instance.type.symbol.module = "builtins"
            value.instance.type.symbol.name = name

    with pytest.raises(interpose.InterposeError), altered(other_type):
        x = plain


def test_calls_that_are_not_on_the_list() -> None:
    counts = collections.Counter()

    def call(value: Any) -> None:
        if value.WhichOneof("kind") == "call":
            value.call.function.module, value.call.function.name = "os", "abort"

    with pytest.raises(interpose.InterposeError, match="os.abort is not among"), altered(call):
        x = counts


class Endless:
    def __hash__(self) -> int:
        while not quick:
            pass
        return 1


quick = True


def test_hashing_runs_under_the_blocks_bounds() -> None:
    table = {Endless(): 1}

    def slow(value: Any) -> None:
        for binding in value.class_source.reads if value.WhichOneof("kind") == "class_source" else ():
            binding.value.boolean = False

    with pytest.raises(interpose.InterposeError, match="longer than"), altered(slow, 0.3):
        x = table


def test_a_long_chain_of_objects_is_an_error_and_no_crash() -> None:
    top = low = Linked()
    for _ in range(200):
        low = Linked(low)
    with pytest.raises(interpose.InvalidArgument, match="nested"), Shipped():
        x = low
