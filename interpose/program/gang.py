"""Puts the invokes of a trace into a gang: the invokes that start in the same step.

An invoke belongs to the gang because its block waits at a barrier, or because a joint invoke, which has no prompt, sees its rows.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from interpose import capture
from interpose.contract.errors import InvalidArgument
from interpose.program.check import frame_at
from interpose.v1.trace_pb2 import Invoke, Prompt, Trace
from interpose.v1.value_pb2 import Objects
from interpose.wire.gang import barriers_of, circular, joint_invokes


@dataclass
class Planned:
    """One invoke before its values are encoded."""

    block: capture.Block
    reads: dict[str, object]
    prompt: Prompt | None
    sampling: Mapping[str, object]
    group: int | None  # the same number for all sequences of a prompt; None: one sequence


def writers(every: Sequence[Planned], index: int, name: str) -> set[int]:
    """Return the earlier invokes that assign a name."""
    group = every[index].group
    return {
        i
        for i, earlier in enumerate(every[:index])
        if name in earlier.block.writes and (earlier.group is None or earlier.group != group)
    }


def form_gang(trace: Trace, every: Sequence[Planned], objects: Objects, shared: Container[str]) -> None:
    """Put invokes that must start in the same step into a gang.

    These are the invokes that wait at a barrier. If an invoke has no prompt, all invokes of the trace are the gang. While
    they run, the invokes of a gang see the names that the others assign.

    Args:
        trace: the message; its invokes get their part of it.
        every: the invokes, in the order of the trace.
        objects: the objects that the invokes refer to.
        shared: the names of shared variables.

    Raises:
        InvalidArgument: the invokes could not run in this way.
    """
    reached = [barriers_of(invoke.program, objects) for invoke in trace.invokes]
    gang = {index for index, barriers in enumerate(reached) if barriers}
    if joint_invokes(trace):
        if gang:
            message = (
                "a barrier and an invoke without a prompt exclude each other in one trace: what the block without a "
            )
            message += "prompt changed and what one at the barrier did could be the same rows"
            raise _at_barrier(trace.invokes[min(gang)], every[min(gang)], message)
        gang = set(range(len(trace.invokes)))
    exchanged: dict[str, None] = {}
    for index in sorted(gang):
        planned, invoke = every[index], trace.invokes[index]
        invoke.gang = True
        if planned.group is not None:
            what = "that waits at a barrier" if reached[index] else "beside one without a prompt"
            raise _at_barrier(invoke, planned, f"an invoke {what} has one sequence, not n")
        for number, count in reached[index].items():
            users = sum(number in barriers for barriers in reached)
            if users < count:
                message = f"the barrier waits for {count} invokes and {users} of the trace's use it"
                raise _at_barrier(invoke, planned, f"{message}: make it with tracer.barrier({users})", number)
        after: set[int] = set()
        for name in (name for name in planned.block.reads if name not in shared):
            if any(name in every[other].block.writes for other in gang - {index}):
                exchanged[name] = None
            after |= writers(every, index, name) - gang
        del invoke.after[:]
        invoke.after.extend(sorted(after))
    trace.exchanged.extend(exchanged)
    loop = circular(trace)
    if loop is not None:
        planned = every[loop]
        raise InvalidArgument(
            "this block reads what an invoke with a barrier assigns, so it runs when that one has ended, and another "
            "invoke with a barrier reads what this block assigns; call the barrier in this block too",
            frames=[frame_at(planned.block.body[0], planned.block.filename)],
        )


def _at_barrier(invoke: Invoke, planned: Planned, message: str, number: int | None = None) -> InvalidArgument:
    """Return an error at the first line of a block that names a barrier, else at its start."""
    held = [binding for binding in invoke.program.reads if binding.value.WhichOneof("kind") == "barrier"]
    names = [binding.name for binding in held if number in (None, binding.value.barrier.number)]
    body = planned.block.body
    nodes = [node for name in names for node in uses(body, name)] or list(body)
    return InvalidArgument(message, frames=[frame_at(nodes[0], planned.block.filename)])


def uses(body: Sequence[ast.AST], name: str) -> Iterable[ast.AST]:
    """Return where a name is used, in the order of the lines."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return sorted(named, key=lambda node: (node.lineno, node.col_offset))
