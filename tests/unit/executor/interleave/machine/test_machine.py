"""The machine's own rules: what it takes, what it imports, and that its codes are the protocol's."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from executor.interleave.machine import events, instructions
from executor.interleave.machine.events import Arrived, Code, Compared, Event, StepBegan, StepEnded, TurnEnded
from executor.interleave.machine.instructions import BeginStep, Hook, Instruction, SeveralTurns, Start, Turn
from executor.interleave.machine.machine import Machine, UnexpectedEvent
from interpose.v1 import trace_pb2 as pb
from tests.unit.executor.interleave.machine.situations import DONE, at, begin, machine

FOREIGN = (
    "vllm",
    "torch",
    "numpy",
    "greenlet",
    "google.protobuf",
    "executor.block",
    "executor.model",
    "executor.parallel",
)


def test_an_answer_that_was_not_asked_for_is_refused() -> None:
    with pytest.raises(UnexpectedEvent, match="answers nothing"):
        machine("a").handle(DONE)


@pytest.mark.parametrize("event", [Compared([]), StepEnded(), Arrived(())])
def test_another_event_before_the_answer_is_refused(event: Event) -> None:
    made = machine("a")
    made.handle(StepBegan({"a": 3}))
    with pytest.raises(UnexpectedEvent, match="instead of"):
        made.handle(event)
    assert made.handle(at("mlp")) == [Hook("mlp", "output")]


def test_several_events_may_be_given_at_once() -> None:
    made = machine("a")
    assert made.handle(StepBegan({"a": 3}), at("mlp")) == [BeginStep(("a",)), Start("a", 3), Hook("mlp", "output")]


def test_a_machine_without_blocks_is_idle() -> None:
    made = Machine()
    assert made.idle
    assert begin(made, "") == [BeginStep(())]
    assert made.handle(StepEnded()) == []


@pytest.mark.parametrize("code", Code)
def test_the_codes_are_those_of_the_protocol(code: Code) -> None:
    assert code == pb.ErrorCode.Value(f"ERROR_CODE_{code.name}")


def kinds(module: object, base: type) -> list[type]:
    return [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, base) and one is not base]


@pytest.mark.parametrize(
    "kind", kinds(events, Event) + kinds(instructions, Instruction), ids=lambda kind: kind.__name__
)
def test_events_and_instructions_are_frozen_and_have_slots(kind: type) -> None:
    assert "__dict__" not in dir(kind)
    if kind not in (Turn, SeveralTurns):
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", kinds(instructions, Turn), ids=lambda kind: kind.__name__)
def test_every_turn_is_answered_with_its_end(kind: type[Turn]) -> None:
    assert kind.answer is TurnEnded


def test_an_instruction_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Start("a", 3).tokens = 4  # type: ignore[misc]


def test_the_machine_loads_nothing_of_the_engine() -> None:
    code = f"""
import sys
import executor.interleave.machine.machine
print([name for name in {FOREIGN!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
