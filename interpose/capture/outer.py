"""Runs the outer block of a trace in the notebook: rewritten, with the caller's names.

The body becomes the body of a function with the original positions, so that tracebacks show the user's lines and
blocks inside of it are captured as if the file itself ran. The caller's variables are the function's free variables. A
variable that a closure of the caller's shares is that same cell; any other is copied in, and copied back at the end if
the body may assign it.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Callable

from interpose.capture.block import Block
from interpose.capture.flags import future_flags
from interpose.capture.parsing import parse_text
from interpose.capture.recent import Recent
from interpose.capture.rewrite import GUARD, SAVE, rewrite
from interpose.capture.scope import Scope
from interpose.capture.skip import known_source

_compiled: Recent[types.CodeType] = Recent(256)


def run_outer(block: Block, scope: Scope, save: Callable[[object], object]) -> None:
    """Runs a block's body here, with ``x.save()`` made into ``save(x)``.

    What the body assigns is assigned in `scope`, also where the body raises; its exceptions propagate.
    """
    caller = scope.frame.f_code
    local = frozenset(name for name in (*block.reads, *block.writes) if scope.is_local(name))
    code = _compiled.get(block, (caller.co_name, local))
    if code is None:
        code = _compile(block, caller, local)
        _compiled.put(block, code, (caller.co_name, local))
    cells = shared_cells(scope)
    cells.update({SAVE: types.CellType(save), GUARD: types.CellType(_no_guard)})
    for name in code.co_freevars:
        if name not in cells:
            cells[name] = _copied_cell(scope, name)
    closure = tuple(cells[name] for name in code.co_freevars)
    function = types.FunctionType(code, scope.globals, caller.co_name, None, closure)
    try:
        function()
    finally:
        assigned = {name: cells[name] for name in block.writes if name in local}
        scope.assign({name: cell.cell_contents for name, cell in assigned.items() if _is_bound(cell)})


def _no_guard() -> None:
    """An outer block is not ended from outside, so its handlers have nothing to let through."""


def _compile(block: Block, caller: types.CodeType, local: frozenset[str]) -> types.CodeType:
    """Compiles the body to the code of a function.

    The function's free variables are `local` and the names of the rewriting.
    """
    tree = rewrite(ast.Module(body=copy.deepcopy(block.body), type_ignores=[]), keep_nonlocal=True)
    outside = sorted(local | {SAVE, GUARD})
    module = [name for name in block.writes if name not in local]
    body: list[ast.stmt] = [ast.Nonlocal(names=outside), *tree.body]
    if module:
        body.insert(0, ast.Global(names=module))
    unbound = [ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=ast.Constant(None)) for name in outside]
    factory = _function("factory", [*unbound, _function("body", body)])
    first = tree.body[0]
    for node in ast.walk(factory):
        if isinstance(node, (ast.stmt, ast.expr)) and not hasattr(node, "lineno"):
            ast.copy_location(node, first)
    module_tree = ast.Module(body=[factory], type_ignores=[])
    code = compile(module_tree, block.filename, "exec", flags=future_flags(caller), dont_inherit=True)
    for _ in range(2):  # down to the factory, and to the body in it
        code = next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    code = code.replace(co_name=caller.co_name)
    _know(code, block)
    return code


def _function(name: str, body: list[ast.stmt]) -> ast.stmt:
    """Returns the tree of a function without parameters.

    Parsing one finds the fields that this Python's functions have.
    """
    function = parse_text(f"def {name}(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = body
    return ast.copy_location(function, next(statement for statement in body if hasattr(statement, "lineno")))


def _know(code: types.CodeType, block: Block) -> None:
    """Makes blocks inside the body, and inside functions it defines, find their source."""
    known_source(code, block.origin)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _know(constant, block)


def shared_cells(scope: Scope) -> dict[str, types.CellType]:
    """Returns the cells of the caller's variables.

    A cell is found if a function holds it that the caller defined and still names.
    """
    caller = scope.frame.f_code
    cells: dict[str, types.CellType] = {}
    if not (caller.co_cellvars or caller.co_freevars):
        return cells
    for value in list(scope.frame.f_locals.values()):
        if isinstance(value, types.FunctionType) and value.__closure__ and value.__code__ in caller.co_consts:
            pairs = zip(value.__code__.co_freevars, value.__closure__, strict=True)
            cells.update((name, cell) for name, cell in pairs if _is_cell_of(scope, name, cell))
    return cells


def _is_cell_of(scope: Scope, name: str, cell: types.CellType) -> bool:
    """Returns whether a cell is the caller's own for a name.

    A function of an earlier call of the caller has other cells.
    """
    try:
        value = scope.lookup(name)
    except KeyError:
        return not _is_bound(cell)
    return _is_bound(cell) and cell.cell_contents is value


def _copied_cell(scope: Scope, name: str) -> types.CellType:
    try:
        return types.CellType(scope.lookup(name))
    except KeyError:
        return types.CellType()


def _is_bound(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
