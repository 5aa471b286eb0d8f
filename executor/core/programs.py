"""The source texts of a trace and the code that they compile to.

A block, a function and a class travel as source. Parsing and compiling hold the interpreter's lock. So a process of the
engine's own does both (`executor.engine.compiler`) before the request is scheduled, and a worker only loads the finished code.
Engine and worker name a text, and all that its code depends on, by one digest.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import marshal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Literal

from interpose.capture import remake, rewrite
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Binding, Class, Function, Value
from interpose.wire.encoder import WireError
from interpose.wire.walk import parts

# Code that a text compiles to, after the interpreter's magic number; or why the text does not compile.
Code = bytes | str


@dataclass(frozen=True)
class Unit:
    """One source text with everything that its code depends on.

    Attributes:
        kind: whether the text is a block, a function or a class.
        source, filename, first_line, indent: as in the message that brought the text.
        name: the name of the function or class.
        given: the names of the values that travel with a class, sorted.
        tracers: the names that are bound to the tracer, sorted.
    """

    kind: Literal["block", "function", "class"]
    source: str
    filename: str
    first_line: int
    indent: int
    name: str = ""
    given: tuple[str, ...] = ()
    tracers: tuple[str, ...] = ()

    @classmethod
    def of_block(cls, program: pb.Program) -> Unit:
        origin = (program.source, program.filename, program.first_line, program.indent)
        return cls("block", *origin, tracers=tracers_in(program.reads))

    @classmethod
    def of_function(cls, function: Function) -> Unit:
        origin = (function.source, function.filename, function.first_line, function.indent)
        return cls("function", *origin, name=function.name, tracers=tracers_in(function.reads))

    @classmethod
    def of_class(cls, source: Class) -> Unit:
        origin = (source.source, source.filename, source.first_line, source.indent)
        given = tuple(sorted({binding.name for binding in source.needs}))
        return cls("class", *origin, source.name, given, tracers_in([*source.needs, *source.reads]))

    @property
    def key(self) -> str:
        """The digest under which the unit's code is kept."""
        return _key_of(self) if len(self.source) <= _SHORT else _digest(self)

    @property
    def what(self) -> str:
        """What messages call the unit."""
        return "the block" if self.kind == "block" else self.name

    def parse(self) -> ast.AST:
        """Return the text's syntax tree, whose size is then measured.

        Raises:
            SyntaxError, ValueError, RecursionError, MemoryError: the text cannot be parsed.
        """
        text = self.source
        if self.kind == "function" and text.lstrip().startswith("lambda"):
            text = f"({text}\n)"
        elif text[:1] in (" ", "\t"):
            text = "if 1:\n" + text
        return ast.parse(text, self.filename)

    def compile(self) -> CodeType:
        """Return the text's code.

        Raises:
            SyntaxError, ValueError, OverflowError, RecursionError, MemoryError: the text cannot be compiled.
        """
        origin = (self.source, self.filename, self.first_line, self.indent)
        tracers = frozenset(self.tracers)
        if self.kind == "block":
            return rewrite.compile_block(*origin, tracers)
        if self.kind == "function":
            return remake.compile_function(*origin, self.name, tracers)
        return remake.compile_class(*origin, self.name, frozenset(self.given), tracers)


def _digest(unit: Unit) -> str:
    return hashlib.sha256(repr(tuple(vars(unit).values())).encode(errors="surrogatepass")).hexdigest()


_key_of = functools.lru_cache(1024)(_digest)
_SHORT = 16 << 10  # characters of a text that is remembered


def tracers_in(bindings: Iterable[Binding]) -> tuple[str, ...]:
    """Return the names that are bound to the tracer, sorted."""
    return tuple(sorted({binding.name for binding in bindings if binding.value.WhichOneof("kind") == "tracer"}))


def units_of(trace: pb.Trace) -> list[Unit]:
    """Return the units of a trace: of its blocks, its values and its standing edits."""
    values: list[Value] = [*trace.scope.values, *(binding.value for binding in trace.shared)]
    units = []
    for invoke in trace.invokes:
        units.append(Unit.of_block(invoke.program))
        values.extend(binding.value for binding in invoke.program.reads)
    for edit in trace.applied:
        units.append(Unit.of_block(edit.program))
        values.extend(edit.scope.values)
        values.extend(binding.value for binding in edit.program.reads)
    return list(dict.fromkeys((*units, *_units_in(values))))


def _units_in(values: Iterable[Value]) -> Iterator[Unit]:
    todo = list(values)
    while todo:
        value = todo.pop()
        todo.extend(parts(value))
        kind = value.WhichOneof("kind")
        if kind == "function":
            yield Unit.of_function(value.function)
        elif kind == "class_source":
            yield Unit.of_class(value.class_source)


def weight(tree: ast.AST) -> int:
    """Return the number of nodes of a syntax tree, with the copies that the compiler writes.

    The compiler writes the body of a `finally` twice, and once more for each `return`, `break` and `continue` that leaves its
    `try`. With nesting, twenty short lines become a million copies.
    """
    total = 0
    # A node, the number of its copies, and what a statement that leaves the enclosing `try`s adds.
    todo: list[tuple[ast.AST, int, int]] = [(tree, 1, 0)]
    while todo:
        node, copies, leaving = todo.pop()
        total += copies
        if isinstance(node, ast.Return | ast.Break | ast.Continue):
            total += copies * leaving
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            leaving = 0
        final = getattr(node, "finalbody", None)
        if final:
            inside = leaving + sum(1 for one in final for _ in ast.walk(one))
            todo.extend((one, 2 * copies, leaving) for one in final)
            others = [*node.body, *node.handlers, *node.orelse]  # type: ignore[attr-defined]
            todo.extend((one, copies, inside) for one in others)
        else:
            todo.extend((one, copies, leaving) for one in ast.iter_child_nodes(node))
    return total


def made(unit: Unit, max_nodes: int) -> Code:
    """Compile a unit; return its code, or the reason why it does not compile.

    Args:
        max_nodes: the largest number of nodes that the syntax tree may have.
    """
    try:
        nodes = weight(unit.parse())
        if nodes > max_nodes:
            return (
                f"{unit.what} is too large a program: its syntax tree has {nodes} nodes, where a finally counts for each of its "
                f"copies, and the limit is {max_nodes}; move constants into variables outside of it and cut it into functions"
            )
        return importlib.util.MAGIC_NUMBER + marshal.dumps(unit.compile())
    except SyntaxError as error:
        reason = f"{error.msg} ({unit.filename}, line {error.lineno})"
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:  # e.g. nested too deeply
        reason = f"{type(error).__name__}: {error} ({unit.filename})"
    return f"the server's Python cannot compile {unit.what}: {reason}"


def _load(code: bytes) -> CodeType:
    loaded: CodeType = marshal.loads(code[len(importlib.util.MAGIC_NUMBER) :])
    return loaded


_loaded = functools.lru_cache(512)(_load)  # nothing changes a code object, so requests share it
_MOST_KEPT = 64 << 10  # bytes of a code that is kept


@dataclass(frozen=True)
class Codes:
    """The codes of a trace in a worker.

    Args:
        known: the codes by the units' keys. With None, the worker compiles the texts itself. Only an engine without a
            `TraceEngine` passes None, as tests do.
    """

    known: Mapping[str, Code] | None

    def of(self, unit: Unit) -> CodeType:
        """Return a unit's code.

        Raises:
            WireError: the unit does not compile.
        """
        code: Code | None = made(unit, 1 << 30) if self.known is None else self.known.get(unit.key)
        if code is None:
            raise WireError(f"{unit.what} was not compiled before the request was scheduled")
        if isinstance(code, str):
            raise WireError(code)
        head = len(importlib.util.MAGIC_NUMBER)
        if code[:head] != importlib.util.MAGIC_NUMBER:
            raise WireError("the engine and its workers run different versions of Python")
        return _loaded(code) if len(code) <= _MOST_KEPT else _load(code)
