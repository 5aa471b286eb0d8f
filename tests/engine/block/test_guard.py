"""A few hostile lines fail their own block; the engine and its neighbours go on."""

from __future__ import annotations

from typing import Any

import pytest

from executor.engine.compiler import Compiler
from interpose.capture import remake, rewrite
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench
from tests.engine.harness import Block, compile_here

PROMPT = [5, 400, 17, 99, 256]
OTHER = [8, 8, 1]


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a worker parsed or compiled a text")


def test_workers_only_load_what_was_compiled_elsewhere(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest text that is taken by default, beside a neighbour."""
    lines = "x = 1\n" * 4_000 + "y = f(2) + C.n\nsaved = [y].save()\n"
    compiler = Compiler(20_000)
    bench.engine.compile = compiler.compile
    monkeypatch.setattr(rewrite, "compile_block", never)
    monkeypatch.setattr(remake, "compile_function", never)
    try:
        block = Block(PROMPT, "def f(a):\n    return a\nclass C:\n    n = 5\n" + lines)
        ran, other = bench.engine.run_traces([[block], [Block(OTHER, "z = [model.logits.output.sum().item()].save()")]])
        large = Block(PROMPT, "x = 1\n" * 5_100)
        [refused] = bench.engine.run(large)
    finally:
        bench.engine.compile = compile_here
        compiler.close()
    assert ran.failure is None, ran.failure
    assert ran.saved["saved"] == [7]
    assert other.failure is None
    assert refused.failure is not None
    assert (refused.failure.code, "the limit is 20000" in refused.failure.message) == (
        pb.ERROR_CODE_INVALID_ARGUMENT,
        True,
    )
