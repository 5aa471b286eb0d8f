"""Whether the blocks of one trace see nothing of each other, so that each may run apart.

Blocks of a trace share the objects that they both read. While the loop of a block runs as a plan, the block takes no turn, and a
list that another block reads grows later than it would. So the blocks are apart only if they share nothing that can change. A
tensor is shared without harm if no block can change it: its name then stands in arithmetic alone.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence

from executor.plan.eligible import MOST_TEXT
from interpose.capture.rewrite import parse_block
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Value
from interpose.wire.walk import parts

# What nothing changes; the parts of a tuple are looked at too.
_FIXED = frozenset(
    """none boolean integer big_integer real complex_number text data tuple frozen_set slice ellipsis range dtype device module
    tracer python_module symbol size not_implemented ref""".split()
)
_MOST_BLOCKS = 16  # each of them compares all
_NEW = frozenset(
    {"norm", "mean", "sum", "abs", "max", "min", "shape", "dtype", "ndim"}
)  # what gives no part of the tensor


def why_not_planned(trace: pb.Trace, edit: bool, gang: bool, draws: bool) -> str:
    """Return why no step of a block runs as a plan, "" if steps may.

    Args:
        trace: the block's trace.
        edit: whether the block is a standing edit.
        gang: whether it runs together with other blocks.
        draws: whether the trace's code may draw random numbers.
    """
    if edit:
        return "a standing edit runs as it is"
    if gang:
        return "blocks that run together may change each other's names between their turns"
    if draws and len(trace.invokes) > 1:
        return "the blocks of a trace draw from one generator, in the order of their turns"
    return "a scan has no elements" if trace.scan else why_not_apart(trace)


def why_not_apart(trace: pb.Trace) -> str:
    """Return why the blocks of a trace are not apart, "" if they are."""
    if len(trace.invokes) < 2:
        return ""
    if len(trace.invokes) > _MOST_BLOCKS:
        return f"more than {_MOST_BLOCKS} blocks"
    if trace.shared or trace.variables or trace.exchanged:
        return "the blocks have names in common"
    if any(one.gang or one.joint or one.after for one in trace.invokes):
        return "a block waits for another block"
    seen: set[int] = set()
    tensors: set[int] = set()
    for invoke in trace.invokes:
        mine: set[int] = set()
        for binding in invoke.program.reads:
            for index, value in _reached(binding.value, trace.scope.values):
                kind = value.WhichOneof("kind")
                if kind in ("barrier", "pickled", "instance", "class_source", "remote"):
                    return "a block has an object that other blocks may have too"
                if kind not in _FIXED and index >= 0:
                    mine.add(index)
        both = mine & seen
        if any(trace.scope.values[index].WhichOneof("kind") != "tensor" for index in both):
            return "the blocks read one object that can change"
        tensors |= both
        seen |= mine
    for invoke in trace.invokes:
        names = frozenset(one.name for one in invoke.program.reads if _shares(one.value, tensors, trace.scope.values))
        models = frozenset(one.name for one in invoke.program.reads if one.value.WhichOneof("kind") == "module")
        if names and not _reads_alone(_text(invoke.program), names, models):
            return "the blocks read one tensor that a block may change"
    return ""


def _reached(value: Value, scope: Sequence[Value]) -> Iterator[tuple[int, Value]]:
    """Yield all parts of a value, each with the index of the object that it is in.

    The index is of the trace's scope, and -1 for an object of one block alone.
    """
    todo: list[tuple[int, Value]] = [(-1, value)]
    seen: set[int] = set()
    while todo:
        index, value = todo.pop()
        yield index, value
        if value.WhichOneof("kind") == "ref":
            if value.ref not in seen and value.ref < len(scope):
                seen.add(value.ref)
                todo.append((value.ref, scope[value.ref]))
        else:
            todo.extend((index, part) for part in parts(value))


def _shares(value: Value, tensors: set[int], scope: Sequence[Value]) -> bool:
    return any(index in tensors for index, _ in _reached(value, scope))


def _text(program: pb.Program) -> tuple[str, str, int, int]:
    return program.source, program.filename, program.first_line, program.indent


@functools.lru_cache(256)
def _reads_alone(text: tuple[str, str, int, int], names: frozenset[str], models: frozenset[str]) -> bool:
    """Return whether some names stand in arithmetic alone, whose results are new tensors.

    Args:
        text: the block's.
        names: the names of tensors.
        models: the names of modules.
    """
    if len(text[0]) > MOST_TEXT:
        return False
    try:
        tree = parse_block(*text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    allowed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            allowed.update((id(node.left), id(node.right)))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            allowed.add(id(node.operand))
        else:
            # A list on the left would take the tensor's parts.
            if isinstance(node, ast.AugAssign) and _root(node.target) in models:
                allowed.add(id(node.value))
            if isinstance(node, ast.Attribute) and node.attr in _NEW:
                allowed.add(id(node.value))
    uses = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names)
    return all(isinstance(node.ctx, ast.Load) and id(node) in allowed for node in uses)


def _root(node: ast.AST) -> str:
    """Return the name with which a dotted or indexed expression begins, or ""."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
