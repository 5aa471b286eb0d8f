"""The names of the engine's arguments and flags, read from vLLM's source.

The source is parsed and not imported, because importing vLLM takes many seconds.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

_FILE = "engine/arg_utils.py"
_CLASSES = ("EngineArgs", "AsyncEngineArgs")

_Node = TypeVar("_Node", bound=ast.AST)


@functools.cache
def arguments() -> frozenset[str]:
    """Return the names of `AsyncEngineArgs`' fields.

    The set is empty where vLLM is not installed.
    """
    fields = (node.target for one in _classes() for node in one.body if isinstance(node, ast.AnnAssign))
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))


@functools.cache
def flags() -> frozenset[str]:
    """Return the flags of vLLM's command line, without their `--no-` forms.

    Short flags are in the set too: `--max-model-len` and `-q`.
    """
    found = set()
    for one in _classes():
        for function in _all(one.body, ast.FunctionDef):
            if function.name == "add_cli_args":
                for call in _all(ast.walk(function), ast.Call):
                    if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                        found |= {argument.value for argument in _all(call.args, ast.Constant)}
    return frozenset(str(flag) for flag in found)


def near(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean A or B?" for a name that is close to a known name, else ""."""
    found = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.7)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def check_flags(given: Iterable[str], own: Collection[str]) -> None:
    """Refuse a flag of a command line that neither the command nor vLLM has.

    Args:
        given: the command line, without the flags that the command has already taken.
        own: the flags of the command; an error message suggests them too.

    Raises:
        ValueError: the flag is unknown. The message names the flag and similar flags.
    """
    known = flags()
    if not known:
        return
    for argument in given:
        if not argument.startswith("-") or re.fullmatch(r"-|-?-\d.*|-\.\d.*", argument) or " " in argument:
            continue  # a value
        if argument == "--":
            raise ValueError("'--' does not separate anything here: write the engine's flags behind the model")
        name = _normal(argument)
        if name not in known and not _accepted(name, known):
            alike = (flag for flag in (*known, *own) if flag.startswith("--") == name.startswith("--"))
            raise ValueError(f"unknown flag {argument.partition('=')[0]}{near(name, alike)}")


def _normal(argument: str) -> str:
    """Return a flag's name, with dashes in place of underscores.

    The value of the flag and the keys of a JSON argument are cut off.
    """
    name = argument.partition("=")[0]
    if not name.startswith("--"):
        return name
    return name.partition(".")[0].replace("_", "-")


def _accepted(name: str, known: frozenset[str]) -> bool:
    """Return whether vLLM's parser takes a flag that is not in the list as it is written.

    The parser takes a flag that is abbreviated, negated, or has its value attached.
    """
    if not name.startswith("--"):
        return any(name.startswith(flag) for flag in (*known, "-O") if not flag.startswith("--"))
    if name == "--help":
        return True
    plain = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
    return any(flag.startswith(plain) for flag in known)


def _classes() -> Iterator[ast.ClassDef]:
    # `find_spec` of a module inside the package would import the package.
    package = importlib.util.find_spec("vllm")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        file = Path(folder) / _FILE
        if file.is_file():
            module = ast.parse(file.read_text())
            yield from (one for one in _all(module.body, ast.ClassDef) if one.name in _CLASSES)


def _all(nodes: Iterable[ast.AST], kind: type[_Node]) -> Iterator[_Node]:
    return (node for node in nodes if isinstance(node, kind))
