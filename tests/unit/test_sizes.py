"""Classes and files are small, or say why they are not: a line of the docstring that begins with "Size: " gives the reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("executor", "interpose", "serve_app", "actors")
GENERATED = ROOT / "interpose" / "v1"
MOST_ATTRIBUTES = 15
MOST_ARGUMENTS = 10
MOST_LINES = 400
_REASON = re.compile(r"^\s*Size: .*\w{3}", re.MULTILINE)


def too_big(source: str) -> list[str]:
    """Return what is too big in a module and does not say why, with its sizes."""
    tree = ast.parse(source)
    found = []
    lines = source.count("\n")
    if lines > MOST_LINES and not _excused(tree):
        found.append(f"the file: {lines} lines")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not _excused(node):
            attributes, arguments = len(attributes_of(node)), len(arguments_of(node))
            if attributes > MOST_ATTRIBUTES:
                found.append(f"{node.name}: {attributes} attributes")
            if arguments > MOST_ARGUMENTS:
                found.append(f"{node.name}: {arguments} arguments of the constructor")
    return found


def _excused(node: ast.ClassDef | ast.Module) -> bool:
    return _REASON.search(ast.get_docstring(node) or "") is not None


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the attributes of a class's instances: fields of the class's body, and all that methods set on `self`."""
    found = {name for name, _ in _fields(node)}
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.args.args:
            itself = method.args.args[0].arg
            found |= {
                part.attr
                for part in ast.walk(method)
                if isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and isinstance(part.value, ast.Name)
                and part.value.id == itself
            }
    return found


def arguments_of(node: ast.ClassDef) -> list[str]:
    """Return what a class's constructor takes; the fields of a class without `__init__`, as of a dataclass."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            given = method.args
            extra = [one for one in (given.vararg, given.kwarg) if one is not None]
            return [one.arg for one in (*given.posonlyargs, *given.args[1:], *given.kwonlyargs, *extra)]
    if not node.decorator_list and not any("Tuple" in ast.unparse(base) for base in node.bases):
        return []
    return [name for name, default in _fields(node) if "init=False" not in default]


def _fields(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Return the annotated names of a class's body, each with the source of its default; a protocol's are not its own."""
    if any("Protocol" in ast.unparse(base) for base in node.bases):
        return []
    return [
        (one.target.id, ast.unparse(one.value) if one.value is not None else "")
        for one in node.body
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and "ClassVar" not in ast.unparse(one.annotation)
    ]


def test_classes_and_files_are_small_or_say_why() -> None:
    paths = [
        path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if GENERATED not in path.parents
    ]
    assert paths
    found = [f"{path.relative_to(ROOT)}: {one}" for path in paths for one in too_big(path.read_text())]
    assert not found, "too big; make it smaller, or add a line 'Size: REASON' to its docstring:\n" + "\n".join(found)


def _class(body: str, docstring: str = "A class.") -> str:
    return f'class Big:\n    """{docstring}"""\n{body}'


def _assigned(count: int) -> str:
    return "    def __init__(self):\n" + "".join(f"        self.a{i} = {i}\n" for i in range(count))


def test_attributes_are_counted_wherever_a_method_sets_them() -> None:
    assert too_big(_class(_assigned(MOST_ATTRIBUTES))) == []
    later = "    def later(self):\n        self.b, self.a0 = 1, 2\n        other.c = 3\n"
    assert too_big(_class(_assigned(MOST_ATTRIBUTES) + later)) == [f"Big: {MOST_ATTRIBUTES + 1} attributes"]


def test_arguments_of_a_constructor_and_of_a_dataclass_are_counted() -> None:
    names = ", ".join(f"a{i}" for i in range(MOST_ARGUMENTS))
    assert too_big(_class(f"    def __init__(self, {names}): pass\n")) == []
    assert too_big(_class(f"    def __init__(self, {names}, *, b=1): pass\n")) == [
        f"Big: {MOST_ARGUMENTS + 1} arguments of the constructor"
    ]
    fields = "".join(f"    a{i}: int\n" for i in range(MOST_ARGUMENTS + 1))
    assert too_big("@dataclass\n" + _class(fields)) == [f"Big: {MOST_ARGUMENTS + 1} arguments of the constructor"]
    assert too_big("@dataclass\n" + _class(fields.replace("a0: int", "a0: int = field(init=False)"))) == []
    assert too_big(f"class Big(Protocol):\n{fields}{fields.replace('a', 'b')}") == []


def test_a_reason_excuses_a_class_and_a_file() -> None:
    reason = "A class.\n\n    Size: settings, which are read by name."
    assert too_big(_class(_assigned(MOST_ATTRIBUTES + 1), reason)) == []
    assert too_big(_class(_assigned(MOST_ATTRIBUTES + 1), "A class.\n\n    Size: ")) != []
    long = "x = 1\n" * MOST_LINES
    assert too_big('"""A module."""\n' + long) == [f"the file: {MOST_LINES + 1} lines"]
    assert too_big('"""A module.\n\nSize: a table.\n"""\n' + long) == []
