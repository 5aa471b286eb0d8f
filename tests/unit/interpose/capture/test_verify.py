"""`verify.py` and `source.py`: text that is not what the code was made from is refused, and no other text is."""

from __future__ import annotations

import ast
import importlib.util
import linecache
import os
import random
import textwrap
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from interpose.capture import Block, CapturedContext, CaptureError, Scope
from interpose.capture.rewrite import parse_block
from tests.unit.interpose.capture.random_programs import random_program

PLACES = [
    "{}",
    "def f():\n{}\nf()",
    "async def f():\n{}\nf().send(None)",
    "class A:\n{}",
    "def f():\n  for x in 'q':\n    try: x\n    finally:\n      if 1:\n{}\nf()",
]


class Trace(CapturedContext):
    blocks: ClassVar[list[Block]] = []

    def run_block(self, block: Block, scope: Scope) -> None:
        self.blocks.append(block)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(PLACES), st.sampled_from([" ", "   ", "\t"]))
def test_any_block_is_recognised_and_keeps_its_positions(seed: int, place: str, indent: str) -> None:
    block = "with Trace():\n" + textwrap.indent(random_program(random.Random(seed)), indent)
    text = place.format(block if place == "{}" else textwrap.indent(block, " " * 8)) + "\n"
    note(text)
    name = f"<cell {seed}>"
    try:
        code = compile(text, name, "exec")
    except SyntaxError:  # such as two names for one thing in one scope
        return
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    Trace.blocks.clear()
    try:
        exec(code, {"Trace": Trace})
    except StopIteration:
        pass
    found = Trace.blocks[0]
    again = parse_block(found.source, found.filename, found.first_line, found.indent)
    assert [ast.dump(node, include_attributes=True) for node in again.body] == [
        ast.dump(node, include_attributes=True) for node in found.body
    ]


MODULE = """
import trace_class

def before():
    return 1

def run():
    with trace_class.Trace() as tracer:
        hidden = before() + 2
        total = hidden * 2
    return tracer
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module on disk, not captured from yet."""
    shared = ModuleType("trace_class")
    shared.Trace = Trace  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "trace_class", shared)
    path = tmp_path / "edited.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("edited", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ 2", "+ 3"),
        ("before() +", "before() -"),
        ("hidden = before", "hidden = after"),
        ("        total = hidden * 2\n", ""),
        ("def before", "\ndef before"),
        ("def before():\n    return 1\n", ""),
        ("total = hidden * 2", "total = hidden.norm() * 2"),
    ],
)
def test_a_file_edited_since_it_was_loaded_is_refused(module: ModuleType, old: str, new: str) -> None:
    path = Path(str(module.__file__))
    path.write_text(MODULE.replace(old, new))
    with pytest.raises(CaptureError, match="changed since") as caught:
        module.run()
    assert caught.value.filename == str(path) and "reload" in caught.value.hint


def test_an_edit_elsewhere_does_no_harm(module: ModuleType) -> None:
    path = Path(str(module.__file__))
    path.write_text(MODULE.replace("return 1", "return 2") + "\nmore = 1\n")
    module.run()
    assert Trace.blocks[-1].source == "hidden = before() + 2\ntotal = hidden * 2\n"


def test_an_edit_after_the_first_capture_does_no_harm(module: ModuleType) -> None:
    module.run()
    path = Path(str(module.__file__))
    path.write_text(MODULE.replace("+ 2", "+ 3"))
    linecache.checkcache(str(path))
    module.run()
    assert "+ 2" in Trace.blocks[-1].source


def test_a_module_that_was_edited_and_loaded_again(module: ModuleType) -> None:
    module.run()
    path = Path(str(module.__file__))
    path.write_text("\n\n" + MODULE.replace("+ 2", "+ 33"))
    os.utime(path, (2_000_000_000, 2_000_000_000))
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    module.run()
    assert "+ 33" in Trace.blocks[-1].source


def test_asserts_that_pytest_rewrote() -> None:
    with Trace():
        value = 3
        assert value == 3, "a message"
        assert [item for item in (value, 4) if item] and value is not None
    assert "a message" in Trace.blocks[-1].source
