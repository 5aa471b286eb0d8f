"""Finds out for which of its prompt's rows a block may ask.

A block that asks for none leaves its prompt as it is, and sees of it the logits and the sampled token alone. A block that asks
for the last rows alone leaves those before as they are. These may come from the prefix cache. The proof is about the block's
text, and nothing of the block runs for it. It follows the text up to the first thing that lets the modules of the prompt's step
pass: the logits or the token of that step, a later step, or the result. A module's value of the prompt's step that the block asks
for after that is refused in any trace, as it has passed. Before that, only statements may stand which surely ask for nothing, as
they make lists and numbers, and statements that ask for counted rows (`executor.plan.tails`). Anything else is no proof.

Size: what each kind of statement and expression may do.
"""

from __future__ import annotations

import ast
import enum
import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from executor.core.programs import Unit
from executor.model.tree import LOGITS, SAMPLES
from executor.plan.plain_values import Plain, kept_of
from executor.plan.row_values import RowValues
from executor.plan.tails import LIBRARIES, Names, Tails, Touched, Unproved, binds
from interpose.capture.rewrite import SAVE, parse_block, rewrite
from interpose.capture.syntax import is_steps
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Value

MOST_TEXT = 16 << 10  # characters of a block that is looked at
_LIST_METHODS = frozenset({"append", "extend", "insert"})
_NUMBERS = frozenset("none boolean integer big_integer real complex_number text tensor remote dtype device".split())
_PLAIN = frozenset({"list", "library", "number", "plain"})
_SIMPLE = ast.Expr | ast.Assign | ast.AugAssign | ast.Import | ast.ImportFrom
_COMPARES = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

ASKS = "the block may ask for values of the prompt's modules"
ASKS_ALL = "the block may ask for other rows of the prompt than the last"
OTHERS = (
    "other blocks run in the request or beside it: standing edits, other invokes in one step, or names of other invokes"
)
LONG = "the block's text is too long to be looked at"


@dataclass(frozen=True)
class Asked:
    """Where a block may ask for rows of its prompt.

    Attributes:
        line: the notebook's line, 0 if there is none.
        why: what keeps the prompt from the prefix cache.
    """

    line: int
    why: str

    def __str__(self) -> str:
        return (f"line {self.line}: " if self.line else "") + self.why


def asked_of_prompt(trace: pb.Trace, index: int) -> Asked | None:
    """Return which part of a block may ask for rows of its prompt; None: it asks for none.

    Args:
        trace: the trace, with its standing edits.
        index: the invoke.
    """
    found = rows_of_prompt(trace, index, None)
    return found if isinstance(found, Asked) else None


def rows_of_prompt(trace: pb.Trace, index: int, values: RowValues | None) -> Asked | Touched:
    """Return for which rows of its prompt a block may ask, or why they are not known.

    Args:
        trace, index: as of `asked_of_prompt`.
        values: the values of the model; None: a block that asks for any is not looked at.
    """
    invoke = trace.invokes[index]
    others = trace.edits or trace.applied or trace.exchanged or any(one.joint or one.gang for one in trace.invokes)
    if others or invoke.after:
        return Asked(0, OTHERS)
    names, integers = _kinds(trace, invoke.program)
    return _asked(Unit.of_block(invoke.program), names, integers, values)


def last_of(touched: Touched, tokens: int, step: int) -> int | None:
    """Return how many of a prompt's last rows a block may ask for, None for all.

    Args:
        touched: the rows for which it may ask.
        tokens: the length of the prompt.
        step: the most tokens of a step. The last chunk of a longer prompt may have one row alone.
    """
    last = touched.rows(tokens)
    return None if last >= tokens or (last > 1 and tokens > step) else last


def _kinds(trace: pb.Trace, program: pb.Program) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, int], ...]]:
    """Return what the names that a block reads are bound to, and the numbers among them."""
    plain = Plain(trace.scope.values, kept_of(trace))
    assigned = {name for invoke in trace.invokes for name in invoke.program.writes}
    shared = {binding.name: binding.value for binding in trace.shared}
    names: dict[str, str] = {}
    integers: dict[str, int] = {}
    for binding in (*program.reads, *trace.shared):
        name, value = binding.name, shared.get(binding.name, binding.value)
        lone = len(trace.invokes) == 1 or name not in shared or name not in assigned
        names[name] = _kind(trace, value, plain) if lone else ""
        if names[name] == "number" and value.WhichOneof("kind") == "integer":
            integers[name] = value.integer
    return tuple(sorted(names.items())), tuple(sorted(integers.items()))


def _kind(trace: pb.Trace, value: Value, plain: Plain) -> str:
    """Return what a value is.

    It is "model", "tracer", "list", "library", "number", "plain" for what else leads to no module, "." and the path for another
    module, or "" for any other. A list is "items" if it may lead to a module.
    """
    kind = value.WhichOneof("kind")
    held = value
    if kind == "ref":
        if value.ref in plain.kept or value.ref >= len(trace.scope.values):
            return ""
        held = trace.scope.values[value.ref]
        kind = held.WhichOneof("kind")
    if kind == "module":
        return "" if held is not value else f".{value.module}" if value.module else "model"
    if kind == "python_module":
        return "library" if held.python_module.partition(".")[0] in LIBRARIES else ""
    if kind == "tracer":
        return "tracer"
    if kind in _NUMBERS:
        return "number"
    leads_nowhere = plain.holds(value)
    return ("list" if leads_nowhere else "items") if kind == "list" else "plain" if leads_nowhere else ""


@functools.lru_cache(512)
def _asked(
    unit: Unit, names: tuple[tuple[str, str], ...], integers: tuple[tuple[str, int], ...], values: RowValues | None
) -> Asked | Touched:
    if len(unit.source) > MOST_TEXT:
        return Asked(0, LONG)
    try:
        tree = rewrite(parse_block(unit.source, unit.filename, unit.first_line, unit.indent), frozenset(unit.tracers))
        tails = None if values is None else Tails(tree, _names(names, integers, unit.tracers), values)
        kinds = {name: "list" if kind == "items" else kind for name, kind in names}
        _Reader(kinds, dict(integers), frozenset(unit.tracers), tails).follow(tree.body)
    except Unproved as unproved:
        return Asked(unproved.line, ASKS if values is None else ASKS_ALL)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Asked(0, LONG)
    return Touched() if tails is None else tails.touched


def _names(names: tuple[tuple[str, str], ...], integers: tuple[tuple[str, int], ...], tracers: Iterable[str]) -> Names:
    kinds = dict(names)
    modules = {name: kind[1:] for name, kind in names if kind.startswith(".")}
    modules |= {name: "" for name, kind in names if kind == "model"}
    plain = frozenset(name for name, kind in names if kind in _PLAIN)
    known = frozenset(tracers) | {name for name, kind in names if kind == "tracer"}
    return Names(modules, known, dict(integers), plain, frozenset(kinds) - plain - known - modules.keys())


class _Then(enum.Enum):
    """What is known when a piece of a block has run."""

    NOTHING_ASKED = enum.auto()
    PASSED = enum.auto()  # the modules of the prompt's step have passed, or the block's request has ended
    NEXT_STEP = enum.auto()  # a `continue`


@dataclass
class _Reader:
    """Follows a block's statements in the prompt's step.

    Attributes:
        kinds: what names are bound to, as `_kind` says it.
        integers: the values of names that are bound to whole numbers.
        tracers: the names of the tracer.
        tails: looks at statements that ask for counted rows; None: such a statement is no proof.
        steps: the names of steps, all of which are 0 here.
    """

    kinds: dict[str, str]
    integers: dict[str, int]
    tracers: frozenset[str]
    tails: Tails | None = None
    steps: set[str] = field(default_factory=set)

    def follow(self, body: Sequence[ast.stmt]) -> _Then:
        """Follow statements one after the other.

        Raises:
            Unproved: one of them may ask for anything.
        """
        for node in body:
            then = self._looked_at(node)
            if then is not _Then.NOTHING_ASKED:
                return then
        return _Then.NOTHING_ASKED

    # Statements.

    def _looked_at(self, node: ast.stmt) -> _Then:
        """Follow a statement, or have its rows counted."""
        tails = self.tails
        try:
            then = self._statement(node)
        except Unproved:
            if tails is None:
                raise
            tails.look(node)
            for name in (name for part in ast.walk(node) for name in binds(part)):
                self.kinds[name] = ""
                self.integers.pop(name, None)
                self.steps.discard(name)
            return _Then.NOTHING_ASKED
        if then is _Then.NOTHING_ASKED and tails is not None and isinstance(node, _SIMPLE):
            tails.note(node)
        return then

    def _statement(self, node: ast.stmt) -> _Then:
        if isinstance(node, ast.Pass):
            return _Then.NOTHING_ASKED
        if isinstance(node, ast.Continue):
            return _Then.NEXT_STEP
        if isinstance(node, ast.Expr):
            return self._expression(node.value)
        if isinstance(node, ast.Assign):
            then = self._expression(node.value)
            for target in node.targets:
                if then is _Then.NOTHING_ASKED:
                    then = self._target(target, node.value)
            return then
        if isinstance(node, ast.AugAssign):
            return self._changed(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._import(node)
        if isinstance(node, ast.For) and is_steps(node.iter, self.tracers):
            return self._loop(node)
        if isinstance(node, ast.If):
            return self._choice(node)
        raise Unproved(node)

    def _target(self, node: ast.expr, value: ast.expr) -> _Then:
        """Follow an assignment, whose value has asked for nothing."""
        if isinstance(node, ast.Name):
            self._bind(node, self._made(value))
            return _Then.NOTHING_ASKED
        if isinstance(node, ast.Tuple) and isinstance(value, ast.Tuple) and len(node.elts) == len(value.elts):
            for one, its in zip(node.elts, value.elts, strict=True):
                if not isinstance(one, ast.Name):
                    raise Unproved(node)
                self._bind(one, self._made(its))
            return _Then.NOTHING_ASKED
        if self._is_location(node):
            return _Then.PASSED
        if isinstance(node, ast.Subscript):
            return self._passed(node, node.value)
        raise Unproved(node)

    def _bind(self, node: ast.Name, kind: str) -> None:
        if self.kinds.get(node.id) in ("model", "tracer") or node.id in self.tracers or node.id == SAVE:
            raise Unproved(node)
        self.kinds[node.id] = kind
        self.integers.pop(node.id, None)
        self.steps.discard(node.id)

    def _made(self, value: ast.expr) -> str:
        """Return what a name is bound to that is assigned an expression which asks for nothing."""
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == SAVE:
            value = value.args[0]
        if isinstance(value, ast.List) or self._makes_list(value):
            return "list"
        return "number" if self._is_number(value) else ""

    def _changed(self, node: ast.AugAssign) -> _Then:
        target = node.target
        if isinstance(target, ast.Name):
            both = self.kinds.get(target.id) == "number" and self._is_number(node.value)
            then = self._expression(node.value)
            if then is _Then.PASSED or both:
                if both:
                    self._bind(target, "number")
                return then
            raise Unproved(node)
        if self._is_location(target):
            return _Then.PASSED
        return self._passed(node, target.value)

    def _import(self, node: ast.Import | ast.ImportFrom) -> _Then:
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        else:
            names = ["" if node.level else node.module or ""]
        if any(name.partition(".")[0] not in LIBRARIES for name in names):
            raise Unproved(node)
        for one in node.names:
            if one.name == "*":
                raise Unproved(node)
            bound = ast.copy_location(ast.Name(one.asname or one.name.partition(".")[0], ast.Store()), node)
            self._bind(bound, "library" if isinstance(node, ast.Import) else "")
        return _Then.NOTHING_ASKED

    def _choice(self, node: ast.If) -> _Then:
        """Follow an `if` on the number of the step, or one whose test lets the modules pass."""
        holds = self._holds(node.test)
        if holds is None:
            return self._passed(node, node.test)
        return self.follow(node.body if holds else node.orelse)

    def _holds(self, test: ast.expr) -> bool | None:
        """Return whether a test holds in the prompt's step; None: it is not known."""
        if isinstance(test, ast.Name) and test.id in self.steps:
            return False
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._holds(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            compare = _COMPARES.get(type(test.ops[0]))
            left, right = self._integer(test.left), self._integer(test.comparators[0])
            if compare is not None and left is not None and right is not None:
                return bool(compare(left, right))
        return None

    def _integer(self, node: ast.expr | None) -> int | None:
        """Return the whole number that an expression is in the prompt's step; None: it is not known."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return 0 if node.id in self.steps else self.integers.get(node.id)
        return None

    def _loop(self, node: ast.For) -> _Then:
        """Follow a loop over steps."""
        first, more = self._first_step(node)
        if first > 0:
            return _Then.PASSED  # it waits for a later step
        if not isinstance(node.target, ast.Name):
            raise Unproved(node)
        self._bind(node.target, "number")
        self.steps.add(node.target.id)
        then = self.follow(node.body)
        if then is _Then.PASSED or more:
            return _Then.PASSED
        return self.follow(node.orelse)

    def _first_step(self, node: ast.For) -> tuple[int, bool]:
        """Return the first step of a loop, and whether the loop waits for another one."""
        if isinstance(node.iter, ast.Call):
            return 0, True
        assert isinstance(node.iter, ast.Subscript)
        key = node.iter.slice
        if not isinstance(key, ast.Slice):
            only = self._integer(key)
            if only is None or only < 0:
                raise Unproved(node)
            return only, False
        first = 0 if key.lower is None else self._integer(key.lower)
        stop = None if key.upper is None else self._integer(key.upper)
        by = 1 if key.step is None else self._integer(key.step)
        known = first is not None and by is not None and (key.upper is None or stop is not None)
        if not known or first < 0 or by < 1 or (stop is not None and stop <= first):  # type: ignore[operator]
            raise Unproved(node)
        return first, stop is None or first + by < stop  # type: ignore[operator, return-value]

    # Expressions.

    def _is_location(self, node: ast.AST) -> bool:
        """Return whether an expression is the logits or the sampled token of the model."""
        inner = node.value if isinstance(node, ast.Attribute) and node.attr == "output" else None
        return (
            isinstance(inner, ast.Attribute)
            and inner.attr in (LOGITS, SAMPLES)
            and isinstance(inner.value, ast.Name)
            and self.kinds.get(inner.value.id) == "model"
        )

    def _is_result(self, node: ast.AST) -> bool:
        inner = node.value if isinstance(node, ast.Attribute) and node.attr == "result" else None
        return isinstance(inner, ast.Name) and inner.id in self.tracers

    def _passed(self, node: ast.AST, *inner: ast.AST) -> _Then:
        """Return that the first of some expressions which asks for anything lets the modules pass.

        Raises:
            Unproved: of `node`, where none does.
        """
        for one in inner:
            if self._expression(one) is _Then.PASSED:
                return _Then.PASSED
        raise Unproved(node)

    def _expression(self, node: ast.AST) -> _Then:
        """Follow an expression in the order in which Python evaluates it."""
        if isinstance(node, ast.Constant | ast.Name) or self._is_number(node) or self._makes_list(node):
            return _Then.NOTHING_ASKED
        if self._is_location(node) or self._is_result(node):
            return _Then.PASSED
        if isinstance(node, ast.List | ast.Tuple):
            return self._all(node.elts)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Attribute):
            return _Then.NOTHING_ASKED if self._is_of_library(node) else self._passed(node, node.value)
        if isinstance(node, ast.Subscript):
            return self._passed(node, node.value, node.slice)
        if isinstance(node, ast.BinOp):
            return self._passed(node, node.left, node.right)
        if isinstance(node, ast.Compare):
            return self._passed(node, node.left, node.comparators[0])
        if isinstance(node, ast.UnaryOp):
            return self._passed(node, node.operand)
        if isinstance(node, ast.Slice):
            return self._all([one for one in (node.lower, node.upper, node.step) if one is not None])
        if isinstance(node, ast.ListComp):
            return self._passed(node, node.generators[0].iter)
        raise Unproved(node)

    def _all(self, nodes: Sequence[ast.AST]) -> _Then:
        for one in nodes:
            if self._expression(one) is _Then.PASSED:
                return _Then.PASSED
        return _Then.NOTHING_ASKED

    def _call(self, node: ast.Call) -> _Then:
        function, given = node.func, [*node.args, *(one if one.arg is None else one.value for one in node.keywords)]
        saves = isinstance(function, ast.Name) and function.id == SAVE
        grows = (
            isinstance(function, ast.Attribute)
            and function.attr in _LIST_METHODS
            and isinstance(function.value, ast.Name)
            and self.kinds.get(function.value.id) == "list"
        )
        named = saves or grows or isinstance(function, ast.Name)
        if not named and self._expression(function) is _Then.PASSED:
            return _Then.PASSED
        if self._all(given) is _Then.PASSED:
            return _Then.PASSED
        # Code of a saved object's own may run, so only what is surely a list or a number is saved here.
        if grows or (saves and len(given) == 1 and self._is_plain(given[0])):
            return _Then.NOTHING_ASKED
        raise Unproved(node)

    def _is_of_library(self, node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and self.kinds.get(node.id) == "library"

    def _is_plain(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return self.kinds.get(node.id) in ("list", "number")
        return isinstance(node, ast.List) or self._makes_list(node) or self._is_number(node)

    def _makes_list(self, node: ast.AST) -> bool:
        """Return whether an expression is `list()`, or `[]` that is saved."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords:
            return False
        if node.func.id == SAVE:
            return len(node.args) == 1 and isinstance(node.args[0], ast.List) and not node.args[0].elts
        return node.func.id == "list" and "list" not in self.kinds and not node.args

    def _is_number(self, node: ast.AST) -> bool:
        """Return whether an expression is made of numbers, texts and captured tensors."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Name):
            return self.kinds.get(node.id) == "number"
        if isinstance(node, ast.UnaryOp):
            return self._is_number(node.operand)
        return isinstance(node, ast.BinOp) and self._is_number(node.left) and self._is_number(node.right)
