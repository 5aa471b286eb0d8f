"""Blocks in a machine, and answers to its instructions as a test gives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from executor.core.ended import Ended
from executor.core.location import Kind, Location
from executor.interleave.machine.events import (
    Admitted,
    AtBarrier,
    CacheSpoilt,
    Changed,
    Compared,
    Event,
    Generated,
    Reached,
    Recorded,
    Settled,
    SkipsChecked,
    StepBegan,
    StepEnded,
    Streamed,
    TurnEnded,
    TurnsEnded,
)
from executor.interleave.machine.instructions import (
    AwaitCache,
    CheckCache,
    CheckSkips,
    Compare,
    CompareAdmitted,
    CompareWritten,
    FindChanged,
    Instruction,
    Record,
    Settle,
    SeveralTurns,
    Stream,
    Turn,
)
from executor.interleave.machine.machine import Machine

PROMPT = 3  # tokens of every prompt

DONE = TurnEnded(ended=Ended.DONE)
FAILED = TurnEnded(ended=Ended.FAILED)
STOPPED = TurnEnded(ended=Ended.STOPPED)
RESULT = TurnEnded(waits=Location("", Kind.RESULT, 0))
PAIR = AtBarrier(0, 2)
TRIO = AtBarrier(1, 3)


def location(path: str, step: int = 0) -> Location:
    """Return the output of a module in a step."""
    return Location(path, Kind.OUTPUT, step)


def at(path: str, step: int = 0, **more: Any) -> TurnEnded:
    """A turn ended with a block that waits for a module's output."""
    return TurnEnded(waits=location(path, step), **more)


def for_step(step: int, **more: Any) -> TurnEnded:
    """A turn ended with a block that waits for a step."""
    return TurnEnded(waits=Location("", Kind.STEP, step), **more)


def barrier(barrier: AtBarrier = PAIR, **more: Any) -> TurnEnded:
    """A turn ended with a block that waits at a barrier."""
    return TurnEnded(waits=Location("", Kind.BARRIER, 0, str(barrier)), barrier=barrier, **more)


def calls(name: str = "lm_head(…)", **more: Any) -> TurnEnded:
    """A turn ended with a block that wants a module applied."""
    return TurnEnded(calls=name, **more)


def reached(path: str, position: int = 10) -> Reached:
    """The model is at a module's output."""
    return Reached(path, "output", position)


def machine(*requests: str, alone: bool = True, **facts: Any) -> Machine:
    """Return a machine with the invokes of one trace, as requests of these ids."""
    made = Machine(alone)
    for invoke, request in enumerate(requests):
        assert made.handle(Admitted(request, "t", invoke, 0, PROMPT, **facts)) == []
    return made


def gang(*requests: str, alone: bool = True) -> Machine:
    """Return a machine with invokes that start together."""
    return machine(*requests, alone=alone, gang=len(requests))


def with_edits(*edits: str, alone: bool = True, **facts: Any) -> Machine:
    """Return a machine with the request "a" and standing edits in it, each in a trace of its own name."""
    made = Machine(alone)
    for number, edit in enumerate(edits):
        made.handle(Admitted(edit, edit, 0, 0, PROMPT, owner="a", rank=number - len(edits)))
    made.handle(Admitted("a", "t", 0, 0, PROMPT, **facts))
    return made


def with_joint() -> Machine:
    """Return a machine with the requests "a" and "b", and the joint block "o" that sees their rows."""
    made = Machine()
    made.handle(*(Admitted(key, "t", invoke, 0, PROMPT, gang=2) for invoke, key in enumerate("ab")))
    made.handle(Admitted("o", "t", 2, 0, 0, gang=2, joint=True))
    return made


def default_answer(do: Instruction) -> Event:
    """Return the answer of a block and an engine with which all is well."""
    match do:
        case Compare(blocks):
            return Compared([[0] * 2 * len(blocks)] * 2)
        case CompareWritten(blocks, spoilt):
            return Compared([[*spoilt, *[0] * len(blocks)]] * 2)
        case CompareAdmitted(here):
            return Compared([here, here])
        case FindChanged():
            return Changed(frozenset())
        case CheckCache() | AwaitCache():
            return CacheSpoilt(frozenset())
        case CheckSkips():
            return SkipsChecked()
        case Settle():
            return Settled()
        case Record():
            return Recorded()
        case Stream():
            return Streamed()
    raise AssertionError(f"the test gave no answer to {do}")


def play(
    made: Machine, event: Event, others: dict[type[Instruction], Any] | None = None, /, **turns: Any
) -> list[Instruction]:
    """Tell a machine of an event, answer its instructions, and return all of them in order.

    Args:
        made: the machine.
        event: the event.
        others: answers to instructions that are no turns, by type: one answer, or a list of answers in order.
        turns: how the turns of each block end: one `TurnEnded`, or a list of them in order.
    """
    left = {key: list(ends) if isinstance(ends, list) else [ends] for key, ends in turns.items()}
    given = {kind: list(ends) if isinstance(ends, list) else [ends] for kind, ends in (others or {}).items()}
    seen: list[Instruction] = []
    answer: Event | None = event
    while answer is not None:
        instructions = made.handle(answer)
        seen += instructions
        answer = None
        for i, do in enumerate(instructions):
            if do.answer is None:
                continue
            assert i == len(instructions) - 1, f"{do} has an answer and is not the last of {instructions}"
            if isinstance(do, Turn):
                assert left.get(do.block), f"unexpected turn {do} after {seen}"
                answer = left[do.block].pop(0)
            elif isinstance(do, SeveralTurns):
                assert all(left.get(key) for key in do.blocks), f"unexpected turns {do} after {seen}"
                answer = TurnsEnded([left[key].pop(0) for key in do.blocks])
            else:
                answer = given[type(do)].pop(0) if given.get(type(do)) else default_answer(do)
    assert not any(left.values()), f"these turns did not come: {left}, but {seen}"
    assert not any(given.values()), f"these questions did not come: {given}, but {seen}"
    return seen


def begin(made: Machine, requests: Iterable[str], /, tokens: int = PROMPT, **turns: Any) -> list[Instruction]:
    """Begin a step of these blocks; return the instructions."""
    return play(made, StepBegan(dict.fromkeys(requests, tokens)), **turns)


def end(made: Machine, others: dict[type[Instruction], Any] | None = None, /, **turns: Any) -> list[Instruction]:
    """End the step; return the instructions."""
    return play(made, StepEnded(), others, **turns)


def finish(made: Machine, block: str, /, **turns: Any) -> list[Instruction]:
    """The engine has finished a request; return the instructions."""
    return play(made, Generated(block), **turns)
