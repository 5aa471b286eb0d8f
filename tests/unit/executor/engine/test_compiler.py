"""Texts of traces become code in a process of its own, which a text can neither stop nor use up."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from executor.core.programs import Codes, Unit, units_of, weight
from executor.engine.compiler import Compiler
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Function, Objects, Value
from interpose.wire.encoder import WireError


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler(20_000)
    yield compiler
    compiler.close()


def block(source: str) -> Unit:
    return Unit.of_block(pb.Program(source=source, filename="<cell>", first_line=7))


def nested(levels: int) -> str:
    """`finally` inside of `finally`: a few lines that the compiler writes 2**levels times."""
    lines = [" " * i + "try: a\n" + " " * i + "finally:\n" for i in range(levels)]
    return "".join(lines) + " " * levels + "b\n"


def closures(count: int) -> str:
    """A function with so many variables that lambdas read: the compiler's time grows with their square, its memory does not."""
    kept = "".join(f"    x{i} = 1\n" for i in range(count))
    return f"def f():\n{kept}    return [{', '.join(f'lambda: x{i}' for i in range(count))}]\n"


def ran(compiler: Compiler, unit: Unit) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(Codes(compiler.compile([unit])).of(unit), names)
    return names


def test_code_keeps_the_notebooks_lines(compiler: Compiler) -> None:
    unit = block("x = 1\ndef f():\n    return x + 1\ny = f()\n")
    code = Codes(compiler.compile([unit])).of(unit)
    assert (code.co_filename, code.co_firstlineno) == ("<cell>", 1)
    assert {line for _, _, line in code.co_lines()} >= {7, 8, 10}
    assert ran(compiler, unit)["y"] == 2


def test_functions_and_lambdas(compiler: Compiler) -> None:
    function = Unit.of_function(
        Function(name="f", source="def f(x):\n    return 2 * x\n", filename="a.py", first_line=3)
    )
    given = Unit.of_function(Function(name="g", source="lambda x:\n  3 * x", filename="a.py", first_line=9))
    made = {**ran(compiler, function), **ran(compiler, given)}
    assert made["f"](2) + made["g"](2) == 10  # type: ignore[operator]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = (", "'(' was never closed (<cell>, line"),
        ("x = " + "1+" * 20_000 + "1", "cannot compile the block"),
        ("x = 1\n" * 6000, "24001 nodes"),
        (nested(18), "nodes, where a finally counts"),
    ],
)
def test_what_cannot_be_compiled_is_told(compiler: Compiler, source: str, words: str) -> None:
    unit = block(source)
    with pytest.raises(WireError) as error:
        Codes(compiler.compile([unit])).of(unit)
    assert words in str(error.value)
    assert ran(compiler, block("after = 1"))["after"] == 1


def test_a_text_that_takes_too_long_ends_and_the_next_one_compiles() -> None:
    impatient = Compiler(1 << 30, seconds=3.0)
    try:
        unit = block(closures(20_000))
        codes = Codes(impatient.compile([unit]))
        with pytest.raises(WireError, match="did not compile the block in 3 s"):
            codes.of(unit)
        assert ran(impatient, block("after = 1"))["after"] == 1
    finally:
        impatient.close()


def test_leaving_a_try_counts_what_is_written_again() -> None:
    body = "    try:\n        x\n        return 1\n        return 2\n    finally:\n" + "        y\n" * 10
    plain = "def f():\n" + body.replace("return", "x +")
    assert weight(ast.parse("def f():\n" + body)) > weight(ast.parse(plain)) + 30


def test_the_texts_of_a_trace_are_compiled_once(compiler: Compiler) -> None:
    function = Value(function=Function(name="f", source="def f(): pass", filename="a", first_line=1))
    trace = pb.Trace(id="t", scope=Objects(values=[function, function]))
    for number in (0, 1, 1):
        program = pb.Program(source=f"a = {number}", filename="b", first_line=1)
        program.reads.append(Binding(name="f", value=Value(ref=0)))
        trace.invokes.append(pb.Invoke(program=program))
    units = units_of(trace)
    assert [unit.kind for unit in units] == ["block", "block", "function"]
    assert compiler.compile(units).keys() == {unit.key for unit in units}


def test_a_worker_compiles_nothing_that_did_not_come() -> None:
    with pytest.raises(WireError, match="was not compiled"):
        Codes({}).of(block("x = 1"))


def test_code_that_is_there_is_known_without_waiting(compiler: Compiler) -> None:
    first, second = block("x = 41\n"), block("x = 42\n")
    assert compiler.known([first]) is None
    code = compiler.compile([first])
    assert compiler.known([first]) == code
    assert compiler.known([first, second]) is None
    with compiler._lock:
        assert compiler.known([first]) is None
