"""Finds out how many of its prompt's last rows a block may ask for.

`Tails` looks at statements without following them: whatever runs of them, in whatever order, asks for the rows that it finds,
and for no others. It knows each name of a module (`block = model.blocks[3]`) and of a value (`h = block.resid_post`), if the
block binds the name in one place. A module may be asked for children and weights, and be applied; a value may be indexed with
numbers that stand in the text. Anything else that a module, a value or the tracer is used for is no proof. So is a name of which
it is not known that it leads to no module.

Size: what each kind of statement and expression may do.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from executor.model.module_name import ModuleName
from executor.model.tree import PSEUDO
from executor.plan.row_values import OTHER, ROWS, RowValues
from interpose.capture.rewrite import GUARD, SAVE
from interpose.capture.syntax import is_steps

# Builtins that give no way to a module which a block does not name.
_BUILTINS = frozenset(
    "abs all any bool dict enumerate float frozenset int isinstance len list max min print range reversed round set slice sorted "
    "str sum tuple zip Exception ValueError RuntimeError IndexError KeyError TypeError StopIteration".split()
)
LIBRARIES = frozenset({"torch", "math", "numpy", "interpose"})  # the worker has imported them
_OF_TRACERS = frozenset({"log", "stop"})
_OF_ROWS = frozenset({"dtype", "device"})
_OWN = frozenset({"output", "input", "inputs", "skip", "next"})
_UNEMBED = "unembed"  # its output is the logits

_PARTS = (
    ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.JoinedStr
    | ast.FormattedValue | ast.Slice | ast.Starred | ast.keyword
)  # fmt: skip
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Unproved(Exception):
    """A piece of a block may ask for anything.

    Attributes:
        line: its line, 0 if there is none.
    """

    def __init__(self, node: ast.AST) -> None:
        super().__init__()
        self.line: int = getattr(node, "lineno", 0)


@dataclass(frozen=True)
class Touched:
    """The rows of a prompt for which a block may ask.

    Attributes:
        first: the first row that it counts from the beginning; None: it counts none so.
        last: how many rows from the end it counts so.
    """

    first: int | None = None
    last: int = 0

    def rows(self, tokens: int) -> int:
        """Return how many of the last rows of a prompt with so many tokens the block may ask for."""
        if self.first is None:
            return min(tokens, self.last)
        return min(tokens, max(self.last, tokens - self.first, 1))  # a row past the end is an error of the block's own


@dataclass(frozen=True)
class Names:
    """What the names are bound to that a block reads.

    Attributes:
        modules: paths of modules by name.
        tracers: the names of the tracer.
        integers: whole numbers by name.
        plain: the names of what leads to no module: numbers, texts, tensors, lists of them, and libraries.
        foreign: the names of anything else.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    tracers: frozenset[str] = frozenset()
    integers: Mapping[str, int] = field(default_factory=dict)
    plain: frozenset[str] = frozenset()
    foreign: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Modules:
    """One of some modules, or a list of all of them.

    Attributes:
        paths: of the modules.
        listed: whether it is a list.
    """

    paths: tuple[str, ...]
    listed: bool = False


@dataclass(frozen=True)
class _Rows:
    """A value with a row for each token."""


@dataclass(frozen=True)
class _Items:
    """A tuple or list of the model.

    Attributes:
        held: `ROWS` or `OTHER` for each item.
    """

    held: str


_TRACER = object()
_Kind = object | None  # _Modules, _Rows, _Items, _TRACER or a tuple of kinds; None: a value of the block's own


class Tails:
    """Looks at the statements of one block.

    Args:
        tree: all of the block.
        names: what it reads.
        values: the values of the model.
    """

    def __init__(self, tree: ast.Module, names: Names, values: RowValues) -> None:
        self._tree = tree
        self._names = names
        self._values = values
        self._taken = {*names.modules, *names.tracers, SAVE, GUARD}
        self._bound = Counter[str]()
        self._made: dict[str, tuple[ast.AST, bool]] = {}  # what a name is bound to; whether it is an item of that
        self._kinds: dict[str, _Kind] = {}
        self._open: set[str] = set()
        self._first: int | None = None
        self._last = 0
        self._unknown: ast.stmt | None = None
        for node in ast.walk(tree):
            self._note(node)

    @property
    def touched(self) -> Touched:
        """The rows that the statements so far may ask for."""
        return Touched(self._first, self._last)

    def look(self, node: ast.stmt) -> None:
        """Look at a statement.

        Raises:
            Unproved: it may ask for a row that is not counted.
        """
        if self._unknown is not None:
            raise Unproved(self._unknown)
        self._statement(node, 0)

    def note(self, node: ast.stmt) -> None:
        """Look at a statement that asks for nothing.

        If that is not seen here, no later statement is looked at.
        """
        try:
            self.look(node)
        except Unproved:
            self._unknown = self._unknown or node

    # Names.

    def _note(self, node: ast.AST) -> None:
        """Note what binds names."""
        for name in binds(node):
            self._bound[name] += 1
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._pair(node.targets[0], node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            for target, source in _in_turn(node.target, node.iter):
                self._made[target.id] = source, True

    def _pair(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._made[target.id] = value, False
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._pair(one, its)

    def _name(self, node: ast.Name) -> _Kind:
        name, names = node.id, self._names
        bound = self._bound[name]
        if name in names.modules or name in names.tracers:
            if bound:
                raise Unproved(node)
            return _Modules((names.modules[name],)) if name in names.modules else _TRACER
        if name in (SAVE, GUARD) and not bound:
            return None
        if name in names.plain or (not bound and name in _BUILTINS):
            return None
        if not bound or name in names.foreign:
            raise Unproved(node)
        if bound > 1 or name not in self._made:
            return None
        if name not in self._kinds:
            if name in self._open:  # it is made of itself
                raise Unproved(node)
            self._open.add(name)
            try:
                source, item = self._made[name]
                self._kinds[name] = self._item(source) if item else self._see(source)
            finally:
                self._open.discard(name)
            if isinstance(self._kinds[name], _Rows):
                self._indexed_alone(name, node)
        if isinstance(self._kinds[name], _Items):  # its uses in the whole block are not followed
            raise Unproved(node)
        return self._kinds[name]

    def _indexed_alone(self, name: str, node: ast.AST) -> None:
        """Count the rows that the whole block asks for of a value with a name."""
        uses = sum(isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Load) for one in self._all)
        indexed = [one for one in self._all if isinstance(one, ast.Subscript) and _is_name(one.value, name)]
        kinds = sum(
            isinstance(one, ast.Attribute) and _is_name(one.value, name) and one.attr in _OF_ROWS for one in self._all
        )
        if uses != len(indexed) + kinds:
            raise Unproved(node)
        for one in indexed:
            self._count(one)

    @property
    def _all(self) -> Iterator[ast.AST]:
        return ast.walk(self._tree)

    # Statements.

    def _statements(self, nodes: Sequence[ast.stmt], loops: int) -> None:
        for node in nodes:
            self._statement(node, loops)

    def _statement(self, node: ast.stmt, loops: int) -> None:
        """Look at a statement in so many loops that began with the statement that is looked at."""
        if isinstance(node, ast.Pass | ast.Continue):
            return
        if isinstance(node, ast.Break) and loops:
            return
        if isinstance(node, ast.Expr):
            self._plain(node.value)
        elif isinstance(node, ast.Assign):
            self._assign(node)
        elif isinstance(node, ast.AugAssign):
            self._plain(node.value)
            self._target(node.target, None)
        elif isinstance(node, ast.For):
            self._loop(node, loops)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
        elif isinstance(node, ast.While | ast.If):
            self._plain(node.test)
            self._statements(node.body, loops + isinstance(node, ast.While))
            self._statements(node.orelse, loops)
        elif isinstance(node, ast.With):
            for item in node.items:
                self._plain(item.context_expr)
                if item.optional_vars is not None:
                    self._target(item.optional_vars, None)
            self._statements(node.body, loops)
        elif isinstance(node, ast.Try):
            for part in (node.body, node.orelse, node.finalbody, *(one.body for one in node.handlers)):
                self._statements(part, loops)
            self._plain_all(one.type for one in node.handlers)
        elif isinstance(node, ast.Return):
            self._plain_all([node.value])
        elif isinstance(node, ast.Raise):
            self._plain_all([node.exc, node.cause])
        elif isinstance(node, ast.Assert):
            self._plain_all([node.test, node.msg])
        elif isinstance(node, ast.FunctionDef) and not node.decorator_list:
            self._function(node.args)
            self._statements(node.body, 0)
        else:
            raise Unproved(node)

    def _assign(self, node: ast.Assign) -> None:
        kind = self._see(node.value)
        if kind is not None and not (len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise Unproved(node)
        for target in node.targets:
            self._target(target, kind)

    def _loop(self, node: ast.For, loops: int) -> None:
        if is_steps(node.iter, self._names.tracers):
            if isinstance(node.iter, ast.Subscript):
                self._plain(node.iter.slice)
            kind: _Kind = None
        else:
            kind = self._item(node.iter)
        self._target(node.target, kind)
        self._statements(node.body, 1)
        self._statements(node.orelse, loops)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        apart = isinstance(node, ast.ImportFrom) and (node.level > 0 or any(one.name == "*" for one in node.names))
        bound = {name for one in node.names for name in binds(one)} & self._taken
        if apart or bound or any(name.partition(".")[0] not in LIBRARIES for name in names):
            raise Unproved(node)

    def _function(self, arguments: ast.arguments) -> None:
        self._plain_all([*arguments.defaults, *arguments.kw_defaults])

    def _target(self, node: ast.expr, kind: _Kind) -> None:
        """Look at what is bound or assigned."""
        if isinstance(node, ast.Name):
            if node.id in self._taken or (kind is not None and (self._bound[node.id] > 1 or self._name(node) != kind)):
                raise Unproved(node)
        elif isinstance(node, ast.Tuple | ast.List):
            kinds = kind if isinstance(kind, tuple) else (kind,) * len(node.elts)
            if len(kinds) != len(node.elts) or (kind is not None and not isinstance(kind, tuple)):
                raise Unproved(node)
            for one, its in zip(node.elts, kinds, strict=True):
                self._target(one, its)
        elif kind is not None:
            raise Unproved(node)
        elif isinstance(node, ast.Starred):
            self._target(node.value, None)
        elif isinstance(node, ast.Subscript):
            if self._subscript(node) is not None:
                raise Unproved(node)
        elif isinstance(node, ast.Attribute):
            if self._attribute(node) is not None:
                raise Unproved(node)
            base = self._see(node.value)
            if base is not None and not self._of_logits(base, node.attr):
                raise Unproved(node)
        else:
            raise Unproved(node)

    # Expressions.

    def _plain(self, node: ast.AST) -> None:
        """Look at an expression that must be a value of the block's own."""
        if self._see(node) is not None:
            raise Unproved(node)

    def _plain_all(self, nodes: object) -> None:
        for node in nodes:  # type: ignore[attr-defined]
            if node is not None:
                self._plain(node)

    def _see(self, node: ast.AST) -> _Kind:
        """Look at an expression; return what it is."""
        if isinstance(node, ast.Constant):
            return None
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, _PARTS):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr | ast.keyword):
                    self._plain(child)
            return None
        if isinstance(node, _COMPREHENSIONS):
            for turn in node.generators:
                self._target(turn.target, self._item(turn.iter))
                self._plain_all(turn.ifs)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            self._plain_all(parts)
            return None
        if isinstance(node, ast.Lambda):
            self._function(node.args)
            self._plain(node.body)
            return None
        raise Unproved(node)

    def _attribute(self, node: ast.Attribute) -> _Kind:
        base, name = self._see(node.value), node.attr
        if name.startswith("__"):
            raise Unproved(node)
        if base is None:
            return None
        if base is _TRACER and name == "result":
            return None
        if isinstance(base, _Rows) and name in _OF_ROWS:
            self._last = max(self._last, 1)
            return None
        if not isinstance(base, _Modules) or base.listed:
            raise Unproved(node)
        if self._of_logits(base, name):
            return None
        if name in ("input", "output") and not any(path in self._values.rows for path in base.paths):
            return self._raw(node, base.paths)
        values, found = self._values, list[str]()
        kinds = set[str]()
        for path in base.paths:
            if name in values.rows.get(path, ()):
                kinds.add("rows")
            elif name in values.children.get(path, ()) and not _is_own(name):
                kinds.add("child")
                found.append(f"{path}.{name}" if path else name)
            elif name in values.weights.get(path, ()):
                kinds.add("weight")
            elif name not in values.refused.get(path, ()):
                raise Unproved(node)
        if kinds == {"rows"}:
            self._last = max(self._last, 1)  # the block is at the value, though it may use no row
            return _Rows()
        if kinds == {"child"} and len(found) == len(base.paths):
            return _Modules(tuple(found))
        if kinds == {"weight"}:
            return None
        raise Unproved(node)

    def _raw(self, node: ast.Attribute, paths: Sequence[str]) -> _Kind:
        """Return what the input or output of the engine's own modules is, the same for all of them."""
        forms = {self._values.forms.get(f"{path}.{node.attr}", OTHER) for path in paths}
        form = forms.pop()
        if forms or form == OTHER:
            raise Unproved(node)
        self._last = max(self._last, 1)  # as of a canonical value
        return _Rows() if form == ROWS else _Items(form[1:-1])

    @staticmethod
    def _of_logits(base: _Kind, name: str) -> bool:
        """Return whether an attribute of a module is the logits or the sampled token."""
        return isinstance(base, _Modules) and name == "output" and set(base.paths) <= {*PSEUDO, _UNEMBED}

    def _subscript(self, node: ast.Subscript) -> _Kind:
        base = self._see(node.value)
        if isinstance(base, _Rows):
            self._count(node)
            return None
        if isinstance(base, _Items):
            number = self._integer(node.slice)
            if number is None or not -len(base.held) <= number < len(base.held) or base.held[number] != ROWS:
                raise Unproved(node)
            return _Rows()
        if not isinstance(base, _Modules):
            if base is not None:
                raise Unproved(node)
            self._plain(node.slice)
            return None
        items = base.paths if base.listed else self._values.items(base.paths[0]) if len(base.paths) == 1 else ()
        if not items:
            raise Unproved(node)
        self._plain(node.slice)
        if isinstance(node.slice, ast.Slice):
            return _Modules(items, listed=True)
        number = self._integer(node.slice)
        if number is None:
            return _Modules(items)
        if base.listed:
            return _Modules(items)
        try:
            return _Modules((items[number],))
        except IndexError:
            raise Unproved(node) from None

    def _call(self, node: ast.Call) -> _Kind:
        function = node.func
        if isinstance(function, ast.Attribute) and self._see(function.value) is _TRACER:
            if function.attr not in _OF_TRACERS:
                raise Unproved(node)
        elif isinstance(function, ast.Name) and function.id == "len" and not self._bound["len"] and len(node.args) == 1:
            kind = self._see(node.args[0])
            if isinstance(kind, _Modules) and (kind.listed or all(map(self._values.items, kind.paths))):
                return None
        else:
            kind = self._see(function)
            if kind is not None and not (isinstance(kind, _Modules) and not kind.listed):
                raise Unproved(node)
        self._plain_all([*node.args, *(one.value for one in node.keywords)])
        return None

    def _item(self, node: ast.AST) -> _Kind:
        """Look at what a loop goes through; return what its items are."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not self._bound[node.func.id]:
            if node.func.id == "enumerate" and len(node.args) == 1 and not node.keywords:
                return None, self._item(node.args[0])
            if node.func.id == "zip" and node.args and not node.keywords:
                return tuple(self._item(one) for one in node.args)
        if isinstance(node, ast.List | ast.Tuple) and node.elts:
            kinds = [self._see(one) for one in node.elts]
            modules = [one for one in kinds if isinstance(one, _Modules) and not one.listed]
            if len(modules) == len(kinds):
                return _Modules(tuple(path for one in modules for path in one.paths))
            if any(one is not None for one in kinds):
                raise Unproved(node)
            return None
        kind = self._see(node)
        if kind is None:
            return None
        if not isinstance(kind, _Modules):
            raise Unproved(node)
        items = kind.paths if kind.listed else self._values.items(kind.paths[0]) if len(kind.paths) == 1 else ()
        if not items:
            raise Unproved(node)
        return _Modules(items)

    # Rows.

    def _count(self, node: ast.Subscript) -> None:
        """Count the rows that an index into a value asks for."""
        key = node.slice
        if isinstance(key, ast.Tuple):
            if not key.elts:
                raise Unproved(node)
            self._plain_all(key.elts[1:])
            key = key.elts[0]
        if isinstance(key, ast.Slice):
            bounds = [self._integer(one) for one in (key.lower, key.upper, key.step)]
            known = all(
                one is None or found is not None
                for one, found in zip((key.lower, key.upper, key.step), bounds, strict=True)
            )
            row = bounds[0]
            if not known or row is None or (bounds[2] is not None and bounds[2] < 1):
                raise Unproved(node)
        else:
            row = self._integer(key)
            if row is None:
                raise Unproved(node)
        if row < 0:
            self._last = max(self._last, -row)
        else:
            self._first = row if self._first is None else min(self._first, row)

    def _integer(self, node: ast.AST | None) -> int | None:
        """Return the whole number that an expression always is; None: it is not known."""
        if isinstance(node, ast.Constant):
            return node.value if type(node.value) is int else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._integer(node.operand)
            return None if number is None else -number
        if isinstance(node, ast.Name) and not self._bound[node.id]:
            return self._names.integers.get(node.id)
        return None


def _is_own(name: str) -> bool:
    """Return whether modules have an attribute of a name in a block, which hides a child."""
    return name in _OWN or hasattr(ModuleName, name)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _in_turn(target: ast.expr, source: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Return names that a loop binds, each with what it goes through."""
    if isinstance(target, ast.Name):
        yield target, source
        return
    if not (isinstance(target, ast.Tuple) and isinstance(source, ast.Call) and isinstance(source.func, ast.Name)):
        return
    if source.func.id == "enumerate" and len(target.elts) == 2 and len(source.args) == 1:
        yield from _in_turn(target.elts[1], source.args[0])
    elif source.func.id == "zip" and len(target.elts) == len(source.args):
        for one, its in zip(target.elts, source.args, strict=True):
            yield from _in_turn(one, its)


def binds(node: ast.AST) -> Iterator[str]:
    """Return the names that a node binds, at any depth of functions."""
    name: str | None = None
    if isinstance(node, ast.Name):
        name = None if isinstance(node.ctx, ast.Load) else node.id
    elif isinstance(node, ast.alias):
        name = (node.asname or node.name).partition(".")[0]
    elif isinstance(node, _NAMED):
        name = node.name
    elif isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(node, ast.MatchMapping):
        name = node.rest
    if name is not None:
        yield name
