"""Refuses a variable that two pieces of code share.

Where the code runs, each piece would have a variable of its own. A block and every function or class that it uses travel
apart, each with the values of the names it reads. An object that several of them name is one object there too; an assignment
to a name is seen only where it is made. So what one of them assigns (a block at its own level, a function by ``global`` or
``nonlocal``) none of the others may use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from interpose.capture.block import Block
from interpose.capture.errors import CaptureError
from interpose.capture.functions import module_variable
from interpose.capture.outer import shared_cells
from interpose.capture.scope import Scope


@dataclass(frozen=True)
class Piece:
    """A function or class that travels.

    `what` is its kind for an error, `names` are its names by variable, and some of them it assigns.
    """

    what: str
    filename: str
    line: int
    names: Mapping[object, str]
    stores: frozenset[object]


def piece(what: str, filename: str, line: int, variables: Mapping[str, object], stores: Iterable[str]) -> Piece:
    """Makes a piece from what `function_source` or `class_source` found."""
    assigned = frozenset(variables[name] for name in stores if name in variables)
    return Piece(what, filename, line, {variable: name for name, variable in variables.items()}, assigned)


def refuse_shared(pieces: Iterable[Piece], blocks: Iterable[tuple[Block, Scope]]) -> None:
    """Raises CaptureError for the first variable that one piece assigns and another uses."""
    found = list(pieces)
    for one in found:
        for other in found:
            for variable in one.stores & other.names.keys() if other is not one else ():
                name = one.names[variable]
                raise _shared(one, name, f"{one.what} assigns {name!r}, which {other.what} uses too")
    for block, scope in blocks:
        variables = _variables(block, scope)
        for one in found:
            for variable in one.stores & variables.keys():
                name = variables[variable]
                raise _shared(one, name, f"{one.what} assigns {name!r}, which the block uses too")
            for variable, name in variables.items():
                if name in block.writes and variable in one.names:
                    message = f"the block assigns {name!r}, which {one.what} reads"
                    raise block.origin.error(message, _line(block, name), _HINT)


_HINT = (
    "They run with copies of their names, so the one would not see it: pass the value as an argument, return it, or keep it "
    "in a list or a dict."
)


def _shared(one: Piece, name: str, message: str) -> CaptureError:
    return CaptureError(message, filename=one.filename, line=one.line, hint=_HINT)


def _variables(block: Block, scope: Scope) -> dict[object, str]:
    """The variables that a block uses, by what tells them apart, with their names."""
    cells = shared_cells(scope)
    found: dict[object, str] = {}
    for name in (*block.reads, *block.writes):
        if name in cells:
            found[id(cells[name])] = name
        elif not scope.is_local(name):
            found[module_variable(scope.globals, name)] = name
    return found


def _line(block: Block, name: str) -> int:
    uses = (
        node.lineno
        for statement in block.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
    )
    return min(uses, default=block.first_line)
