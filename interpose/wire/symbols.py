"""Objects that travel by name: installed Python modules, and their functions and classes.

The server imports the same name. It cannot import a user's own module, so such a module does not travel by name.
"""

from __future__ import annotations

import enum
import functools
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from interpose.v1.value_pb2 import Symbol, Value

# Modules with public names of functions written in C, whose `__module__` may be wrong. Only imported modules are searched.
_PUBLIC = (
    "builtins",
    "math",
    "operator",
    "torch",
    "torch.nn.functional",
    "torch.linalg",
    "torch.special",
    "torch.fft",
    "numpy",
)


def module_value(module: ModuleType, by_name: Callable[[str], bool] | None = None) -> Value | None:
    """Return the wire value of an installed module or one of Python's own, else None.

    Args:
        by_name: whether the server can import a module by its name; None: each module that is installed here.
    """
    name = module.__name__
    there = by_name or is_installed
    return Value(python_module=name) if sys.modules.get(name) is module and there(name) else None


def symbol_value(obj: Any, by_name: Callable[[str], bool] | None = None) -> Value | None:
    """Return the wire value of an installed function, class or enumeration member, else None.

    The argument is that of `module_value`.
    """
    there = by_name or is_installed
    if isinstance(obj, enum.Enum):
        member = obj.name
        found = symbol_value(type(obj), by_name)
        if found is None or getattr(type(obj), member, None) is not obj:
            return None
        return Value(symbol=Symbol(module=found.symbol.module, name=f"{found.symbol.name}.{member}"))
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    if not isinstance(name, str) or "<" in name:
        return None
    for module in _candidates(obj):
        if find(module, name) is obj and there(module):
            return Value(symbol=Symbol(module=module, name=name))
    return None


def _candidates(obj: Any) -> Iterator[str]:
    own = [getattr(obj, "__module__", None), getattr(getattr(obj, "__objclass__", None), "__module__", None)]
    public = [
        name for name in own if isinstance(name, str) and not any(part.startswith("_") for part in name.split("."))
    ]
    yield from public
    yield from _PUBLIC
    yield from (name for name in own if isinstance(name, str) and name not in public)


def find(module: str, name: str) -> object:
    """Return the object of a qualified name in an imported module, or None."""
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


@functools.cache
def _package_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib") if key in paths]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.realpath(folder) + os.sep for folder in folders})


def is_installed(module: str) -> bool:
    """Whether a module belongs to Python or an installed package, so a server can have it."""
    top = module.partition(".")[0]
    if top in ("__main__", "__mp_main__"):
        return False
    if top == "interpose" or top in sys.stdlib_module_names:
        return True
    package: Any = sys.modules.get(top)
    files = [getattr(package, "__file__", None), *(getattr(package, "__path__", None) or ())]
    return any(file and os.path.realpath(file).startswith(_package_folders()) for file in files)
