"""Tab completion in IPython and Jupyter for modules, and for a tracer inside its block.

IPython evaluates no attribute of an object that computes its attributes, and does not know the tracer of a `with` statement
that has not run. Modules are data here, so this matcher follows them itself, with Jedi and without.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from interpose.contract.errors import UnknownLocation
from interpose.modules.envoy import Envoy
from interpose.modules.tree import Node
from interpose.tracing.in_block import IN_BLOCK
from interpose.tracing.model import Model

# A name, then attributes, indices and calls without arguments; at the end a dot and the beginning of a name.
_ATTRIBUTE = re.compile(r"(?<![\w.\])'\"])([A-Za-z_]\w*(?:\.\w+|\[[^\[\]\n]*\]|\(\))*)\.(\w*)$")
_NUMBER = re.compile(r"(?<![\w.\])'\"])([A-Za-z_]\w*(?:\.\w+|\[[^\[\]\n]*\]|\(\))*)\[(\d*)$")
_WITH = re.compile(r"\s*(?:async\s+)?with\b")
_OF_OUTER = ("invoke", "barrier", "log")
_OF_EDITS = ("iter", "all", "stop", "log")
_OF_VALUES = ("output", "input")
_BLOCKS = ("trace", "generate", "scan", "edit", "invoke")
_MOST_LINES = 2000


@dataclass(frozen=True)
class Found:
    """Names that complete the code.

    Attributes:
        fragment: the beginning of the name that is written already.
        names: all names that may stand there and begin so.
    """

    fragment: str
    names: tuple[str, ...]


def complete(code: str, names: Mapping[str, object]) -> Found | None:
    """Return the names that may follow the code up to the cursor; None for other code.

    Args:
        code: the text of the cell up to the cursor.
        names: the values of the notebook's names.
    """
    attribute = _ATTRIBUTE.search(code)
    if attribute is not None:
        found = _attributes(code, attribute[1], names)
        return None if found is None else _beginning(attribute[2], found)
    number = _NUMBER.search(code)
    if number is not None:
        node = _follow(number[1], names)
        if isinstance(node, Node) and node.items:
            return _beginning(number[2], [one.path.rpartition(".")[2] for one in node.items])
    return None


def _beginning(fragment: str, names: Sequence[str]) -> Found:
    hidden = not fragment.startswith("_")
    fits = (name for name in names if name.startswith(fragment) and not (hidden and name.startswith("_")))
    return Found(fragment, tuple(dict.fromkeys(fits)))


def _attributes(code: str, chain: str, names: Mapping[str, object]) -> Sequence[str] | None:
    tracer = _of_tracer(code, chain, names)
    if tracer is not None:
        return tracer
    root = names.get(chain)
    if isinstance(root, ModuleType) and root.__name__ == "interpose":
        return dir(root)
    if isinstance(root, Envoy):
        return dir(root)
    found = _follow(chain, names)
    if isinstance(found, Node):
        return dir(Envoy(found, found))
    return None if found is None else _of_tensors()


class _Value:
    """A value that exists only inside a block."""


def _follow(chain: str, names: Mapping[str, object]) -> Node | _Value | None:
    """Return the module or the value that code names; None if it names neither."""
    try:
        written = ast.parse(chain, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    try:
        return _at(written, names)
    except (UnknownLocation, RecursionError):
        return None


def _at(code: ast.expr, names: Mapping[str, object]) -> Node | _Value | None:
    if isinstance(code, ast.Name):
        root = names.get(code.id)
        return root._node if isinstance(root, Envoy) else None
    if isinstance(code, ast.Attribute):
        base = _at(code.value, names)
        if not isinstance(base, Node):
            return None
        if code.attr in base.values or code.attr in base.weights or (code.attr in _OF_VALUES and not base.canonical):
            return _Value()
        return None if code.attr in base.words else base.child(code.attr)
    if isinstance(code, ast.Subscript):
        base = _at(code.value, names)
        if isinstance(base, Node):
            return _item(base, code.slice)
        return base
    if isinstance(code, ast.Call) and isinstance(code.func, ast.Attribute) and code.func.attr == "next":
        return _at(code.func.value, names)
    return None


def _item(base: Node, index: ast.expr) -> Node | None:
    """Return a numbered module; for an index that is no number, the first."""
    if isinstance(index, ast.Slice) or not base.items:
        return None
    try:
        number = ast.literal_eval(index)
    except (ValueError, TypeError):
        number = 0
    return base.child(number) if type(number) is int else None


def _of_tensors() -> Sequence[str]:
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        return sorted({*dir(torch.Tensor), "save"})
    import numpy as np

    return sorted({*dir(np.ndarray), "save"})


def _of_tracer(code: str, name: str, names: Mapping[str, object]) -> Sequence[str] | None:
    """Return the names that a tracer has where the code ends; None for another name."""
    blocks = _blocks_around(code, names)
    kinds = [kind for kind, _ in blocks]
    tracers = {target for kind, target in blocks if kind != "invoke"}
    if name in {target for kind, target in blocks if kind == "invoke"}:
        return IN_BLOCK
    if name not in tracers:
        return None
    if "edit" in kinds:
        return _OF_EDITS
    return _OF_OUTER if kinds[-1] == "outer" else IN_BLOCK


def _blocks_around(code: str, names: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return kind and target of the blocks around the end of the code, outermost first.

    Kinds are "prompt", "outer", "edit" and "invoke". The target is "" for a `with` without `as`.
    """
    lines = code.split("\n")[-_MOST_LINES:]
    found: list[tuple[str, str]] = []
    indent = len(lines[-1]) - len(lines[-1].lstrip())
    for line in reversed(lines[:-1]):
        stripped = line.lstrip()
        column = len(line) - len(stripped)
        if not stripped or stripped.startswith("#") or column >= indent:
            continue
        indent = column
        if _WITH.match(line):
            found = _opened(stripped, names) + found
    first = next((number for number, (kind, _) in enumerate(found) if kind != "invoke"), len(found))
    return found[first:]


def _opened(line: str, names: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the blocks that a `with` statement opens."""
    try:
        statement = ast.parse(f"{line.rstrip()} pass").body[0]
    except (SyntaxError, ValueError):
        return []
    found = []
    for item in statement.items if isinstance(statement, ast.With | ast.AsyncWith) else ():
        call = item.context_expr
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _BLOCKS):
            continue
        kind = call.func.attr
        if kind != "invoke":
            owner = call.func.value
            if not (isinstance(owner, ast.Name) and isinstance(names.get(owner.id), Model)):
                continue
            given = call.args or any(one.arg in ("prompt", "input_ids", None) for one in call.keywords)
            kind = "edit" if kind == "edit" else "prompt" if given else "outer"
        target = item.optional_vars
        found.append((kind, target.id if isinstance(target, ast.Name) else ""))
    return found


def matcher(context: Any) -> dict[str, Any]:
    """Return the completions for a `CompletionContext` of IPython, as a `SimpleMatcherResult`."""
    from IPython.core.completer import SimpleCompletion
    from IPython.core.getipython import get_ipython

    lines = context.full_text.split("\n")[: context.cursor_line + 1]
    code = "\n".join([*lines[:-1], lines[-1][: context.cursor_position]])
    shell: Any = get_ipython()
    found = None if shell is None else complete(code, shell.user_ns)
    if found is None or not found.names:
        return {"completions": []}
    completions = [SimpleCompletion(name) for name in found.names]
    return {"completions": completions, "matched_fragment": found.fragment, "suppress": True}


matcher.matcher_api_version = 2  # type: ignore[attr-defined]
matcher.matcher_identifier = "interpose"  # type: ignore[attr-defined]


def install() -> None:
    """Add the matcher to the running IPython, if there is one. Idempotent."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    matchers = getattr(getattr(shell, "Completer", None), "custom_matchers", None)
    if isinstance(matchers, list) and matcher not in matchers:
        matchers.append(matcher)
