"""Finds the source of a class that a block uses, so that a worker can make it again.

It also finds the values that the source does not state. A class does not remember its text, but its methods do: their code
names a file and a line, and is compared with the text. A class without methods is looked for by its name, and taken only
where everything that can be compared agrees. What its body computed, and what was put on it after it was made, travels as
values.
"""

from __future__ import annotations

import ast
import copy
import enum
import inspect
import linecache
import re
import sys
import types
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from interpose.capture import members
from interpose.capture.analysis import block_reads_writes, outer_writes
from interpose.capture.block import block_text
from interpose.capture.functions import defaults_of, variables_of
from interpose.capture.recent import Recent
from interpose.capture.remake import (
    assigned_attributes,
    attribute_name,
    base_name,
    computed_defaults,
    default_name,
    methods_of,
    read_given,
)
from interpose.capture.source import Source, load
from interpose.capture.syntax import bound_names
from interpose.capture.verify import same_function


@dataclass(frozen=True)
class ClassSource:
    """A class as text, as `remake.compile_class` takes it, and the values that belong to it.

    `needs` has the values of the names that the class statement reads while it runs, `reads` those that only its methods
    read. `attributes` are to be set on the class afterwards. `unbound` are names that the statement itself reads and that
    have no value any more (a variable of a function that has returned), each with its line. `stores` and `variables` are
    as a function's (`functions.FunctionSource`). `node` is the statement with
    its own positions and must not be changed.

    Size: data: each field is a field of the message that carries a class.
    """

    source: str
    filename: str
    first_line: int
    indent: int
    name: str
    needs: dict[str, object] = field(repr=False)
    reads: dict[str, object] = field(repr=False)
    attributes: dict[str, object] = field(repr=False)
    unbound: dict[str, int]
    stores: tuple[str, ...]
    variables: dict[str, object] = field(repr=False)
    node: ast.ClassDef = field(repr=False)


@dataclass(frozen=True)
class _Statement:
    """A class statement, and those of the class's functions that stand in it, by code object."""

    source: Source
    node: ast.ClassDef
    own: Mapping[types.CodeType, members.Method]


_statements: Recent[_Statement] = Recent(256)


def class_source(cls: type) -> ClassSource | None:
    """Returns the source of a class made by a ``class`` statement, or None without source."""
    origin = _statements.get(cls) or _find(cls)
    if origin is None:
        return None
    _statements.put(cls, origin)
    node = origin.node
    names = _surroundings(cls)
    given = _given(cls, origin)
    body = copy.deepcopy(node)
    read_given(body, given)
    evaluated = [name for name in _evaluated(body) if name != cls.__name__]
    needs = {
        name: given[name] if name in given else names[name] for name in evaluated if name in given or name in names
    }
    looked_up = [name for name in block_reads_writes([body])[0] if name not in evaluated]
    reads = {name: names[name] for name in looked_up if name in names and names[name] is not cls}
    stores = tuple(name for method in origin.own.values() for name in outer_writes(method))
    own = [function for _, function in members.functions_of(cls, nested=True) if _belongs(function, cls)]
    variables = variables_of(own, (*evaluated, *looked_up, *stores))
    builtin = vars(sys.modules["builtins"])
    unbound = {name: _line_of(body, name) for name in evaluated if name not in needs and name not in builtin}
    source, first_line, indent = block_text(origin.source.lines, [node])
    attributes = _later_attributes(cls, origin, given)
    filename = origin.source.filename
    return ClassSource(
        source, filename, first_line, indent, cls.__name__, needs, reads, attributes, unbound, stores, variables, node
    )  # fmt: skip


def _find(cls: type) -> _Statement | None:
    """Finds the one class statement that the class was made from."""
    functions = [function for _, function in members.functions_of(cls)]
    found: list[_Statement] = []
    for filename, module_globals, code in _files(cls, functions):
        if code is None and not _mentions(linecache.getlines(filename, module_globals), cls):
            continue
        try:
            source = load(filename, module_globals, code)
        except SyntaxError:
            continue
        if source is None:
            continue
        for node, qualname in _class_statements(source.tree):
            origin = _compared(cls, source, node, functions) if qualname == cls.__qualname__ else None
            if origin is not None:
                found.append(origin)
    found = [origin for origin in found if _says_all(cls, origin.node)] or found
    if not found or any(ast.dump(origin.node) != ast.dump(found[0].node) for origin in found[1:]):
        return None
    return found[0]


_File = tuple[str, "dict[str, object] | None", "types.CodeType | None"]  # its name, its module, code that stands in it


def _files(cls: type, functions: list[types.FunctionType]) -> list[_File]:
    """The files that may hold a class: those of its methods, else its module's, else every cell."""
    own: dict[str, _File] = {}
    for function in functions:
        code = function.__code__
        if _belongs(function, cls) and not members.is_generated(function):
            own.setdefault(code.co_filename, (code.co_filename, function.__globals__, code))
    if own:
        return list(own.values())
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    files: list[_File] = [(name, None, None) for name in list(linecache.cache)]
    return [(file, vars(module), None), *files] if file else files


def _mentions(lines: list[str], cls: type) -> bool:
    """Returns whether a text may have the class's statement.

    linecache knows hundreds of files. It would take a minute to parse them all.
    """
    text = "".join(lines)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)  # as Python reads identifiers
    name = cls.__qualname__.rpartition(".")[2]
    return re.search(rf"\bclass[\s\\]+{re.escape(name)}\b", text) is not None


def _belongs(function: types.FunctionType, cls: type) -> bool:
    """Whether a function says that it was defined in a class's body."""
    return function.__module__ == cls.__module__ and function.__qualname__.startswith(f"{cls.__qualname__}.")


def _class_statements(tree: ast.AST, prefix: str = "") -> Iterator[tuple[ast.ClassDef, str]]:
    """The class statements of a file, each with the qualified name of the class it makes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield node, prefix + node.name
            yield from _class_statements(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _class_statements(node, f"{prefix}{node.name}.<locals>.")
        else:
            yield from _class_statements(node, prefix)


def _compared(cls: type, source: Source, node: ast.ClassDef, functions: list[types.FunctionType]) -> _Statement | None:
    """The place at a class statement, or None if the class was made from another text."""
    line = vars(cls).get("__firstlineno__")  # from 3.13
    if line is not None and line != min([node.lineno, *(item.lineno for item in node.decorator_list)]):
        return None
    texts = [part for part in ast.walk(node) if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))]
    own: dict[types.CodeType, members.Method] = {}
    for function in functions:
        code = function.__code__
        if not source.holds(code):
            continue
        for text in texts:
            if text.name == code.co_name and same_function(code, text):
                own[code] = text
    methods = {members.mangled(cls, method.name) for method in methods_of(node)}
    if not methods <= vars(cls).keys() or (methods and not own) or not _same_data(cls, node):
        return None
    return _Statement(source, node, own)


def _same_data(cls: type, node: ast.ClassDef) -> bool:
    """Whether a class has the docstring, the annotations and the names that its text says."""
    values = vars(cls)
    text = ast.get_docstring(node, clean=False)
    if text is not None and inspect.cleandoc(text) != inspect.cleandoc(values.get("__doc__") or ""):
        return False
    annotated = [
        members.mangled(cls, part.target.id)
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]
    known = values.keys() | inspect.get_annotations(cls).keys()
    if not set(annotated) <= known:
        return False
    if members.is_made_from_fields(cls) or any(methods_of(node)):
        return True
    return all(
        name in values and (value is members.UNKNOWN or members.same(values[name], value))
        for name, value in members.constants_of(cls, node)
    )


def _says_all(cls: type, node: ast.ClassDef) -> bool:
    """Whether a text binds every name that is on the class, so that it is the likelier of two."""
    bound = {members.mangled(cls, name) for name in bound_names(node)}
    return all(name in bound or members.is_automatic(cls, name, value) for name, value in vars(cls).items())


# The values that belong to it.


def _surroundings(cls: type) -> dict[str, object]:
    """Returns the names that a class's text may read.

    They are names of its module, and of the functions around it as far as methods hold them.
    """
    functions = [function for _, function in members.functions_of(cls, nested=True)]
    own = [function for function in functions if _belongs(function, cls)]
    module = own[0].__globals__ if own else vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    names = dict(module)
    for function in own:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name == "__class__":
                continue
            try:
                names[name] = cell.cell_contents
            except ValueError:
                names.pop(name, None)
    return names


def _given(cls: type, origin: _Statement) -> dict[str, object]:
    """Returns the values that the class's text reads instead of its expressions.

    The keys are the names under which the values travel.
    """
    given: dict[str, object] = {}
    node, values = origin.node, vars(cls)
    bases = values.get("__orig_bases__", cls.__bases__)
    if len(bases) == len(node.bases):
        for index, base in enumerate(node.bases):
            if isinstance(base, (ast.Name, ast.Attribute)):
                given[base_name(index)] = bases[index]
    functions = [function for _, function in members.functions_of(cls) if function.__code__ in origin.own]
    for name, statement in assigned_attributes(node):
        value = values.get(members.mangled(cls, name), members.UNKNOWN)
        another = any(value is function for function in functions)  # `alias = method`
        if value is not members.UNKNOWN and not (
            another or members.is_descriptor(value) or members.is_field(cls, statement.value)
        ):
            given[attribute_name(name)] = value
    for function in functions:
        text = origin.own[function.__code__]
        found = defaults_of(function)
        for argument, _ in computed_defaults(text.args):
            if argument.arg in found:
                given[default_name(argument.arg, text.name)] = found[argument.arg]
    return given


def _later_attributes(cls: type, origin: _Statement, given: Mapping[str, object]) -> dict[str, object]:
    """What is on a class that running its text does not put there."""
    if issubclass(cls, enum.Enum) or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return {}
    constants = dict(members.constants_of(cls, origin.node))
    methods = {members.mangled(cls, method.name): method for method in methods_of(origin.node)}
    nested = {part.name for part in origin.node.body if isinstance(part, ast.ClassDef)}
    later: dict[str, object] = {}
    for name, value in vars(cls).items():
        if name in methods and _is_from_text(value, methods[name], origin):
            continue
        if members.is_automatic(cls, name, value) or attribute_name(name) in given or name in nested:
            continue
        if name in constants and members.same(constants[name], value):
            continue
        own = isinstance(value, types.FunctionType) and value.__code__ in origin.own
        if name in constants and (own or members.is_descriptor(value)):
            continue  # `alias = method`, `size = property(_size)`: the text makes them again
        later[name] = value
    return later


def _is_from_text(value: object, method: members.Method, origin: _Statement) -> bool:
    """Whether an attribute is what the text's own method of that name becomes."""
    if method.decorator_list:
        functions = list(members.unwrapped(value))
        # What a decorator returned may be anything; its text makes it again.
        return all(function.__code__ in origin.own for function in functions) and not members.is_lambda(value)
    plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value  # __new__, __class_getitem__
    return isinstance(plain, types.FunctionType) and plain.__code__ in origin.own and not hasattr(plain, "__wrapped__")


def _evaluated(node: ast.ClassDef) -> list[str]:
    """The names that a class statement itself reads, its methods' bodies left out."""
    bare = copy.deepcopy(node)
    for part in ast.walk(bare):
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            part.body = [ast.copy_location(ast.Pass(), part)]
    return list(block_reads_writes([bare])[0])


def _line_of(node: ast.AST, name: str) -> int:
    uses = (part for part in ast.walk(node) if isinstance(part, ast.Name) and part.id == name)
    return min((part.lineno for part in uses), default=getattr(node, "lineno", 0))
