"""Makes functions and classes again from their text.

They get the values that were computed when they were defined. A default value, a computed class attribute or a base class was
evaluated long ago in the notebook, and its expression may mean something else by now. So the value travels under a name of
its own, and the text is made to read that name.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Container, Iterator

from interpose.capture.parsing import parse_text
from interpose.capture.rewrite import FLAGS, move, parse_block, rewrite
from interpose.capture.syntax import is_constant

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def compile_function(
    source: str, filename: str, first_line: int, indent: int, name: str, tracers: frozenset[str] = frozenset()
) -> types.CodeType:
    """Compiles a ``def`` or lambda to module code that binds `name` when it is executed.

    A default value that is not a constant is read from the name that `default_name` gives its parameter. Decorators are
    left out.

    Raises SyntaxError as `compile_block` does, and for a text that holds anything else than that one function.
    """
    statement: ast.stmt
    if source.lstrip().startswith("lambda"):
        # The parentheses let the expression go on over several lines, as those around the call it stood in did.
        expression = parse_text(f"({source}\n)", filename, "eval").body
        move(expression, first_line - 1, indent - 1, 0)
        target = ast.Name(id=name, ctx=ast.Store())
        statement = ast.copy_location(ast.Assign(targets=[target], value=expression), expression)
        function: ast.AST = expression
    else:
        statement = _only(parse_block(source, filename, first_line, indent).body, filename, first_line, "function")
        function = statement
    if not isinstance(function, Definition):
        raise SyntaxError(f"{filename}, line {first_line}: expected one function definition")
    _read_defaults(function, [argument.arg for argument, _ in computed_defaults(function.args)], "")
    if not isinstance(function, ast.Lambda):
        function.decorator_list = []
        function.name = name
    return _compile(statement, filename, tracers)


def compile_class(
    source: str,
    filename: str,
    first_line: int,
    indent: int,
    name: str,
    given: Container[str],
    tracers: frozenset[str] = frozenset(),
) -> types.CodeType:
    """Compiles a ``class`` statement to module code that binds `name` when it is executed.

    Its decorators are compiled too.

    `given` are the names of the values that travel with it: see `read_given`.

    Raises SyntaxError as `compile_block` does, and for a text that holds anything else than that one class.
    """
    statement = _only(parse_block(source, filename, first_line, indent).body, filename, first_line, "class")
    if not isinstance(statement, ast.ClassDef) or statement.name != name:
        raise SyntaxError(f"{filename}, line {first_line}: expected the definition of the class {name}")
    read_given(statement, given)
    return _compile(statement, filename, tracers)


def _only(body: list[ast.stmt], filename: str, line: int, what: str) -> ast.stmt:
    if len(body) != 1:
        raise SyntaxError(f"{filename}, line {line}: expected one {what} definition")
    return body[0]


def _compile(statement: ast.stmt, filename: str, tracers: frozenset[str]) -> types.CodeType:
    tree = rewrite(ast.Module(body=[statement], type_ignores=[]), tracers)
    return compile(tree, filename, "exec", flags=FLAGS, dont_inherit=True)


def default_name(parameter: str, method: str = "") -> str:
    """Returns the name under which a parameter's default value travels.

    `method` is set for a method of a class.
    """
    return f"__interpose_default_{method}_{parameter}__" if method else f"__interpose_default_{parameter}__"


def is_default(name: str) -> bool:
    """Whether a default value travels under a name."""
    return name.startswith("__interpose_default_")


def attribute_name(name: str) -> str:
    """The name under which the value of a shipped class's attribute travels."""
    return f"__interpose_attribute_{name}__"


def base_name(index: int) -> str:
    """The name under which a shipped class's base class travels."""
    return f"__interpose_base_{index}__"


def computed_defaults(arguments: ast.arguments) -> list[tuple[ast.arg, ast.expr]]:
    """Returns the parameters with a computed default, each with the default's expression."""
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs: list[tuple[ast.arg, ast.expr | None]] = []
    if arguments.defaults:
        pairs += zip(positional[-len(arguments.defaults) :], arguments.defaults, strict=True)
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [(argument, value) for argument, value in pairs if value is not None and not is_constant(value)]


def methods_of(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that stand directly in a class's body."""
    return (part for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)))


def assigned_attributes(node: ast.ClassDef) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    """Returns the attributes of a class's body that have computed values.

    Each comes with its statement, ``name = expression``.
    """
    for part in node.body:
        if isinstance(part, ast.Assign) and len(part.targets) == 1:
            target, value = part.targets[0], part.value
        elif isinstance(part, ast.AnnAssign) and part.value is not None:
            target, value = part.target, part.value
        else:
            continue
        if isinstance(target, ast.Name) and not is_constant(value):
            yield target.id, part


def read_given(node: ast.ClassDef, given: Container[str]) -> None:
    """Makes a class statement read computed values by the names under which they travel.

    The values are bases, attributes, and defaults of methods. Only those whose names are among `given`; every other
    expression is evaluated where the class is made again.
    """
    for index, base in enumerate(node.bases):
        if base_name(index) in given:
            node.bases[index] = _read(base_name(index), base)
    for name, statement in assigned_attributes(node):
        if attribute_name(name) in given and statement.value is not None:
            statement.value = _read(attribute_name(name), statement.value)
    for method in methods_of(node):
        names = [argument.arg for argument, _ in computed_defaults(method.args)]
        _read_defaults(method, [name for name in names if default_name(name, method.name) in given], method.name)


def _read_defaults(function: Definition, parameters: list[str], method: str) -> None:
    """Makes a function take its computed defaults by the names under which they travel."""
    arguments = function.args
    names: dict[int, ast.expr] = {}
    for argument, value in computed_defaults(arguments):
        if argument.arg in parameters:
            names[id(value)] = _read(default_name(argument.arg, method), value)
    arguments.defaults = [names.get(id(value), value) for value in arguments.defaults]
    arguments.kw_defaults = [value and names.get(id(value), value) for value in arguments.kw_defaults]


def _read(name: str, instead_of: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Name(id=name, ctx=ast.Load()), instead_of)
