"""Gangs: invokes that start in the same step because their blocks wait for each other.

The functions here read a `Trace` message. With them the client, and then the service, refuse a trace that could never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from interpose.v1.trace_pb2 import Program, Trace
from interpose.v1.value_pb2 import Objects, Value
from interpose.wire.walk import parts


def gang_of(trace: Trace) -> list[int]:
    """Return the invokes of the gang that have a prompt."""
    return [index for index, invoke in enumerate(trace.invokes) if invoke.gang and not invoke.joint]


def joint_invokes(trace: Trace) -> list[int]:
    """Return the joint invokes: they have no prompt, and see the rows of all prompts."""
    return [index for index, invoke in enumerate(trace.invokes) if invoke.joint]


def start_after(trace: Trace) -> list[set[int]]:
    """Return, for each invoke, the invokes that must end before its start.

    An invoke of the gang waits for the invokes that any invoke of the gang waits for.
    """
    after = [set(invoke.after) for invoke in trace.invokes]
    gang = gang_of(trace)
    common = {other for index in gang for other in after[index]}
    for index in gang:
        after[index] = common
    return after


def circular(trace: Trace) -> int | None:
    """Return an invoke that the gang waits for and that waits for the gang, else None.

    Such an invoke could never run.
    """
    gang = set(gang_of(trace))
    waits: list[bool] = []  # whether an invoke waits for the gang; it waits for earlier invokes only
    for invoke in trace.invokes:
        waits.append(any(other in gang or waits[other] for other in invoke.after))
    wanted = {other for index in gang for other in trace.invokes[index].after}
    return next((other for other in sorted(wanted) if other in gang or waits[other]), None)


def refusal(trace: Trace) -> str:
    """Return the reason why the invokes of a trace could not run, "" if they can."""
    joint = joint_invokes(trace)
    if trace.scan and (len(trace.invokes) != 1 or trace.stream or trace.edits or joint or gang_of(trace)):
        return "a scan has one prompt, and neither streams nor runs with edits"
    if trace.explain and not trace.scan:
        return "an explanation is a scan: its block runs on shapes"
    if circular(trace) is not None:
        return "invokes that start together cannot wait for what waits for one of them"
    if not joint:
        return ""
    if len(gang_of(trace)) + len(joint) < len(trace.invokes) or len(joint) == len(trace.invokes):
        return "an invoke without a prompt sees the rows of all others, which start together; there has to be one"
    if trace.stream:
        return "the block of an invoke without a prompt cannot stream what it saves: run the trace without stream=True"
    if any(invoke.after for invoke in trace.invokes):
        return "invokes that an invoke without a prompt sees start together and cannot wait for each other's ends"
    if any(trace.invokes[index].sampling or trace.invokes[index].prompt.WhichOneof("kind") for index in joint):
        return "an invoke without a prompt generates nothing, so it takes no sampling parameters"
    return ""


def barriers_of(program: Program, objects: Objects) -> Mapping[int, int]:
    """Return the barriers that a block can reach: the count of blocks, by number."""
    return {value.barrier.number: value.barrier.count for value in _reached(program, objects)}


def _reached(program: Program, objects: Objects) -> Iterator[Value]:
    todo = [binding.value for binding in program.reads]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        kind = value.WhichOneof("kind")
        if kind == "barrier":
            yield value
        elif kind == "ref":
            if value.ref not in seen and value.ref < len(objects.values):
                seen.add(value.ref)
                todo.append(objects.values[value.ref])
        else:
            todo.extend(parts(value))
