"""Decides how the code of a library reaches the server: by its name, or as source.

The server imports by name what it has in the version of the notebook. The functions and classes of other libraries travel as
source, as far as the block uses them, with what they read. Compiled code cannot travel.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import Any

from interpose.contract.packages import Packages
from interpose.v1.service_pb2 import Package
from interpose.wire import symbols

# Every server has them, and their names mean the same over versions.
ALWAYS = frozenset({"torch", "numpy"})
_MOST_FILES = 20_000  # of a package that are looked at


class Libraries:
    """What the server has, against what the notebook has.

    Args:
        ask: returns the packages of the server; None: they are not known, and each library is taken for one of the server's.
    """

    def __init__(self, ask: Callable[[], Packages | None] = lambda: None) -> None:
        self._ask = ask
        self._decided: dict[str, bool] = {}

    def by_name(self, module: str) -> bool:
        """Whether the server can import a module of the notebook by its name."""
        if not symbols.is_installed(module):
            return False
        top = module.partition(".")[0]
        if is_common(top):
            return True
        known = self._decided.get(top)
        if known is None:
            packages = self._ask()
            known = self._decided[top] = packages is None or top in packages.by_module
        return known

    def differs(self, module: str) -> Package | None:
        """Return the server's package of a pure Python module, if its version is another."""
        top = module.partition(".")[0]
        packages = None if is_common(top) or not symbols.is_installed(module) else self._ask()
        found = packages.by_module.get(top) if packages is not None else None
        if found is None or _version(found.name) in ("", found.version) or not is_pure(top):
            return None
        return found

    def missing(self, module: str) -> bool:
        """Whether the server lacks a module that code imports."""
        top = module.partition(".")[0]
        if is_common(top):
            return False
        packages = self._ask()
        return packages is not None and top not in packages.by_module

    def said(self, module: str) -> str:
        """Return what the server has, after a module that it lacks."""
        packages = self._ask()
        return packages.said(module.partition(".")[0]) if packages is not None else ""

    def hint(self, subject: object) -> str:
        """Return what to do about an object that cannot be sent; "" if the server has its library."""
        module = subject.__name__ if isinstance(subject, ModuleType) else getattr(subject, "__module__", None)
        module = module if isinstance(module, str) else type(subject).__module__
        if module.partition(".")[0] not in sys.modules:  # compiled modules often say "_name" of "name"
            module = module.lstrip("_")
        if not symbols.is_installed(module) or self.by_name(module):
            return ""
        return (
            f". The server does not have {named(module)}. {self.said(module)} Write what you need of it as a function "
            f"of your own, or have it installed there: {_pip(module)}"
        )

    def refuse_imports(self, what: str, body: Iterable[ast.AST]) -> tuple[str, ast.stmt] | None:
        """Return why code cannot import a module on the server, with the statement; else None.

        Args:
            what: the code, for the message.
            body: its syntax trees.
        """
        for module, node in imports(body):
            if self.missing(module):
                top = module.partition(".")[0]
                return (
                    f"{what} imports {module}, which the server does not have. {self.said(module)} Write the import "
                    f"above the block, then what the block uses of {top} is sent as source; or have it installed there: "
                    f"{_pip(module)}"
                ), node
        return None


def is_common(top: str) -> bool:
    """Whether a top-level module is one of Python's, or of a library that every server has."""
    return top in ALWAYS or top == "interpose" or top in sys.stdlib_module_names


def _pip(module: str) -> str:
    """Return the command that installs the notebook's version of a package."""
    name, _, version = named(module).partition(" ")
    return f'pip install "{name}=={version}"' if version else f"pip install {name}"


def named(module: str) -> str:
    """Return the package of a notebook's module with its version, for a message."""
    top = module.partition(".")[0]
    names = importlib.metadata.packages_distributions().get(top, [top])
    return f"{names[0]} {_version(names[0])}".strip()


def absence(module: ModuleType) -> str:
    """Return why a module is not imported by its name on the server."""
    if symbols.is_installed(module.__name__):
        return f"the module {module.__name__} is not on the server"
    return f"the module {module.__name__} is yours"


def difference(other: Package, why: str) -> str:
    """Return what to say where the server's version of a library is used.

    Args:
        other: the server's version.
        why: why the notebook's code is not sent.
    """
    return (
        f"the block uses {other.name} {other.version} of the server, not {named(other.modules[0])} of this Python, whose code "
        f'cannot be sent: {why}. With the same version there is no difference: pip install "{other.name}=={other.version}"'
    )


def imports(body: Iterable[ast.AST]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the modules that code imports by statements, with the statements.

    An import in a `try` statement is left out: the code knows what to do without the module.
    """
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                yield node.module, node
        elif not isinstance(node, ast.Try):
            yield from imports(ast.iter_child_nodes(node))


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def is_pure(top: str) -> bool:
    """Whether an imported package has no compiled code."""
    package: Any = sys.modules.get(top)
    folders = list(getattr(package, "__path__", None) or ())
    files = [str(getattr(package, "__file__", None) or "")]
    inside = (name for folder in folders for _, _, names in os.walk(folder) for name in names)
    files += itertools.islice(inside, _MOST_FILES)
    return not any(name.endswith(tuple(EXTENSION_SUFFIXES)) for name in files)
