"""Checks the contract with vLLM against vLLM's source, without importing vLLM.

Only the source is read, so a version that cannot run here can be checked too: `python -m executor.plugin.contract PATH`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.plugin.contract_entries import Attributes, Call, Entry, Exactly, Group, Method, Source, Variable, size

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)
_REGISTER = ("register_buffer", "register_parameter")  # torch sets an attribute by its name with these methods.
_ENVIRONMENT = "vllm.envs"
KINDS = {"abstract": "abstract methods", "fields": "fields"}


@dataclass(frozen=True)
class Broken:
    """An entry of the contract that a version of vLLM does not keep.

    Attributes:
        what: what is missing or different.
        why: why the project needs the entry.
        where: which part of the project uses it.
    """

    what: str
    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} — {self.where}: {self.why}"


@dataclass(frozen=True)
class Class:
    """A class of vLLM and the module that defines it."""

    module: str
    node: ast.ClassDef

    @property
    def path(self) -> str:
        return f"{self.module}.{self.node.name}"


class Package:
    """The source of one version of vLLM.

    Args:
        root: the folder of the package.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        # The cache belongs to one package, so that one process can compare two packages.
        self.names = functools.cache(self._names)
        self._tree = functools.cache(self._read)
        self.line_of = functools.cache(self._line_of)
        self.members_of = functools.cache(self._members_of)

    def _file(self, module: str) -> Path | None:
        location = self._root.joinpath(*module.split(".")[1:])
        files = (location / "__init__.py", location.with_suffix(".py"))
        return next((file for file in files if file.is_file()), None) if module.split(".")[0] == "vllm" else None

    def _read(self, module: str) -> ast.Module | None:
        file = self._file(module)
        return ast.parse(file.read_text()) if file is not None else None

    def has_module(self, module: str) -> bool:
        """Return whether there is such a module or package."""
        return self._file(module) is not None

    def _names(self, module: str) -> dict[str, ast.AST | str]:
        """Return what a module's names stand for: definitions, or dotted paths of imports."""
        tree = self._tree(module)
        found: dict[str, ast.AST | str] = {}
        for node in _statements(tree.body if tree is not None else ()):
            for name, target in _bindings(node, self._package_of(module)):
                if name == "*":
                    assert isinstance(target, str)
                    found = {**self.names(target), **found}
                elif name not in found or isinstance(target, ast.ClassDef | _Function):
                    found[name] = target
        return found

    def _package_of(self, module: str) -> str:
        file = self._file(module)
        return module if file is not None and file.name == "__init__.py" else module.rpartition(".")[0]

    def find(self, path: str) -> tuple[str, ast.AST] | None:
        """Return what a dotted path stands for and the module that defines it, or None."""
        parts = path.split(".")
        end = len(parts)
        while end and not self.has_module(".".join(parts[:end])):
            end -= 1
        module, rest = ".".join(parts[:end]), parts[end:]
        if not end:
            return None
        if not rest:
            tree = self._tree(module)
            return (module, tree) if tree is not None else None
        target = self.names(module).get(rest[0])
        if isinstance(target, str):
            return self.find(".".join((target, *rest[1:]))) if target != ".".join((module, rest[0])) else None
        if target is None or len(rest) == 1:
            return (module, target) if target is not None else None
        if not isinstance(target, ast.ClassDef):
            return None
        for one in self.line_of(Class(module, target)):
            member = next((node for name, node in _members(one.node) if name == rest[1]), None)
            if member is not None:
                return one.module, member
        return None

    def find_class(self, path: str) -> Class | None:
        """Return a class by its path."""
        found = self.find(path)
        return Class(found[0], found[1]) if found is not None and isinstance(found[1], ast.ClassDef) else None

    def _line_of(self, start: Class) -> list[Class]:
        """Return a class and its base classes in vLLM, nearest first."""
        line, todo = [start], [start]
        while todo:
            one = todo.pop(0)
            for base in one.node.bases:
                name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
                first, _, rest = name.partition(".")
                target = self.names(one.module).get(first)
                path = f"{one.module}.{first}" if isinstance(target, ast.AST) else target
                found = self.find_class(f"{path}.{rest}" if rest else path) if path else None
                if found is not None and all(other.path != found.path for other in line):
                    line.append(found)
                    todo.append(found)
        return line

    def _members_of(self, start: Class) -> set[str]:
        """Return the names that a class and its bases define, and that their methods set on `self`."""
        return {name for one in self.line_of(start) for name in (*dict(_members(one.node)), *_set_on_self(one.node))}

    def abstract(self, start: Class) -> set[str]:
        """Return the names of the methods that a subclass must have."""
        found: dict[str, bool] = {}
        for one in reversed(self.line_of(start)):
            for name, node in _members(one.node):
                decorators = node.decorator_list if isinstance(node, _Function) else []
                found[name] = any(ast.unparse(one).endswith("abstractmethod") for one in decorators)
        return {name for name, is_abstract in found.items() if is_abstract}

    def fields(self, start: Class) -> set[str]:
        """Return the names of the public fields that a class and its bases annotate."""
        nodes = (node for one in self.line_of(start) for node in one.node.body if isinstance(node, ast.AnnAssign))
        names = {
            node.target.id
            for node in nodes
            if isinstance(node.target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation)
        }
        return {name for name in names if not name.startswith("_")}

    def variables(self) -> set[str]:
        """Return the names of the environment variables that vLLM reads."""
        tree = self._tree(_ENVIRONMENT)
        nodes = ast.walk(tree) if tree is not None else ()
        keys = (key for node in nodes if isinstance(node, ast.Dict) for key in node.keys)
        return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def check(package: Package, groups: Iterable[Group]) -> list[Broken]:
    """Return the entries of the contract that a version of vLLM breaks."""
    return [
        Broken(what, entry.why, f"{group.folder}, {group.name}")
        for group in groups
        for entry in group.entries
        for what in _wrong(package, entry)
    ]


def _wrong(package: Package, entry: Entry) -> Iterator[str]:
    if isinstance(entry, Attributes):
        yield from _wrong_attributes(package, entry)
    elif isinstance(entry, Exactly):
        yield from _wrong_names(package, entry)
    elif isinstance(entry, Variable):
        if entry.name not in package.variables():
            yield f"{entry.name}: no such variable in {_ENVIRONMENT}"
    else:
        found = package.find(entry.path)
        if found is None:
            yield f"{entry.path}: there is no such name"
        elif isinstance(entry, Method | Call):
            yield from _wrong_signature(package, entry, found[1])
        elif isinstance(entry, Source):
            missing = _missing(" ".join(ast.unparse(found[1]).split()), entry.contains)
            if missing:
                yield f"{entry.path}: its source has no `{missing}`" + (
                    " in this order" if len(entry.contains) > 1 else ""
                )


def _wrong_attributes(package: Package, entry: Attributes) -> Iterator[str]:
    found = package.find_class(entry.cls)
    if found is None:
        yield f"{entry.cls}: there is no such class"
        return
    known = package.members_of(found)
    for name in entry.names:
        if name not in known:
            yield f"{entry.cls}.{name}: there is no such attribute"


def _wrong_names(package: Package, entry: Exactly) -> Iterator[str]:
    found = package.find_class(entry.cls)
    if found is None:
        yield f"{entry.cls}: there is no such class"
        return
    names = package.abstract(found) if entry.kind == "abstract" else package.fields(found)
    for name in sorted(names - set(entry.names)):
        yield f"{entry.cls}.{name}: new among its {KINDS[entry.kind]}"
    for name in sorted(set(entry.names) - names):
        yield f"{entry.cls}.{name}: no longer among its {KINDS[entry.kind]}"


def _wrong_signature(package: Package, entry: Method | Call, node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):  # A call of a class is a call of its constructor.
        found = package.find(f"{entry.path}.__init__")
        fields = _fields(package, entry.path)
        if found is None and fields is not None:
            node = fields
        elif found is not None:
            node = found[1]
    if not isinstance(node, _Function):
        yield f"{entry.path}: it is no function"
        return
    mine = _parse(entry.parameters)
    theirs = _without_self(node, entry.path)
    if isinstance(entry, Method):
        if ast.unparse(mine) != ast.unparse(theirs):
            yield f"{entry.path}: takes ({ast.unparse(theirs)}), no longer ({ast.unparse(mine)})"
    else:
        yield from (f"{entry.path}: {why}" for why in _refused(mine, theirs))


def _refused(call: ast.arguments, takes: ast.arguments) -> Iterator[str]:
    """Yield the reasons why a function does not take a call.

    Args:
        call: the names of the positional arguments and, after `*`, of the keyword arguments.
        takes: the function's parameters, without `self`.
    """
    positional = [one.arg for one in (*takes.posonlyargs, *takes.args)]
    given = [one.arg for one in call.args]
    named = [one.arg for one in call.kwonlyargs]
    known = {*positional, *(one.arg for one in takes.kwonlyargs)}
    for index, name in enumerate(given):
        here = positional[index] if index < len(positional) else None
        if here != name and not (here is None and takes.vararg):
            yield f"argument {index + 1} is {here or 'too many'}, no longer {name}"
    for name in named:
        if name not in known and not takes.kwarg:
            yield f"takes no {name}"
    required = positional[: len(positional) - len(takes.defaults)]
    required += [one.arg for one, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if default is None]
    for name in required if call.kwarg is None else ():
        if name not in {*given, *named} and name not in positional[: len(given)]:
            yield f"also needs {name}"


def _missing(text: str, contains: tuple[str, ...]) -> str:
    """Return the first text that does not follow the texts before it; "" if all are in order."""
    at = 0
    for one in contains:
        found = text.find(one, at)
        if found < 0:
            return one
        at = found + len(one)
    return ""


def _parse(parameters: str) -> ast.arguments:
    function = ast.parse(f"def f({parameters}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args


def _without_self(function: _Function, path: str) -> ast.arguments:
    """Return a function's parameters without annotations, and without `self` for a method."""
    arguments = _parse(ast.unparse(function.args))
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if one is not None:
            one.annotation = None
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        del arguments.args[0]
    return arguments


def _fields(package: Package, path: str) -> _Function | None:
    """Return the constructor that a data class gets from its fields, or None without fields."""
    start = package.find_class(path)
    fields: dict[str, ast.expr | None] = {}
    for one in reversed(package.line_of(start)) if start is not None else ():
        for node in one.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = node.value
    if not fields:
        return None
    given = ", ".join(name for name, value in fields.items() if value is None)
    rest = ", ".join(f"{name}=None" for name, value in fields.items() if value is not None)
    function = ast.parse(f"def f({given}{', ' if given and rest else ''}{rest}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body and of its blocks, without those of functions and classes."""
    for node in body:
        yield node
        if isinstance(node, _BLOCKS):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _bindings(node: ast.stmt, package: str) -> Iterator[tuple[str, ast.AST | str]]:
    """Yield the names that a statement binds, with their definitions or imported paths."""
    if isinstance(node, ast.ClassDef | _Function):
        yield node.name, node
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join((*above, *([node.module] if node.module else [])))
        for alias in node.names:
            yield alias.asname or alias.name, module if alias.name == "*" else f"{module}.{alias.name}"
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in ast.walk(target):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, node


def _members(cls: ast.ClassDef) -> list[tuple[str, ast.AST]]:
    """Return what a class's body defines.

    If a function has several definitions, the last one comes first.
    """
    nodes = [pair for node in _statements(cls.body) for pair in _bindings(node, "")]
    return [(name, node) for name, node in reversed(nodes) if isinstance(node, ast.AST)]


def _set_on_self(cls: ast.ClassDef) -> Iterator[str]:
    """Yield the names of the attributes that a class's methods set on `self`."""
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _REGISTER:
            yield from (str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant))


def installed() -> Path:
    """Return the folder of the installed vLLM.

    Raises:
        FileNotFoundError: vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise FileNotFoundError("vLLM is not installed; name the folder of its package")
    return Path(folders[0])


def main(arguments: Sequence[str], groups: Sequence[Group], version: str) -> int:
    """Print what a version of vLLM breaks; return 1 if it breaks anything, else 0.

    Args:
        arguments: the folder of vLLM's package. Without it, the installed version is checked.
        groups: the contract.
        version: the version of vLLM for which the contract is written.
    """
    root = Path(arguments[0]) if arguments else installed()
    if not (root / "__init__.py").is_file():
        print(f"{root} is no folder of vLLM's package: it has no __init__.py", file=sys.stderr)
        return 2
    broken = check(Package(root), groups)
    for one in broken:
        print(one)
    facts = sum(size(entry) for group in groups for entry in group.entries)
    print(f"{len(broken)} broken of {facts} in the contract, which is written for vLLM {version}")
    return 1 if broken else 0
