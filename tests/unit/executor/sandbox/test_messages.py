"""Messages that came before, turns as the worker writes them, and waits without a sleep."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy
import pytest
import torch

from executor.core.errors import Refusal
from executor.sandbox import codec, spare
from executor.sandbox.channel import MOST_NUMBER, ChildEnd, Kind
from executor.sandbox.codec import Known, Malformed, decode, decode_turn, encode, encode_turn
from executor.sandbox.pool import Pool
from tests.unit.executor.sandbox.parts import Worker
from tests.unit.executor.sandbox.test_lies import DONE, VALUES, Liar, block, region

ANSWER: dict[str, Any] = {"waits": ("layers.0", "output", 1, ""), "changed": {0: torch.ones(2, 3)}, "skips": [[1]]}
TURN: dict[str, Any] = {
    "block": "request",
    "step": 3,
    "position": -1,
    "used": 0.25,
    "finished": False,
    "prompt_tokens": 4,
    "result": None,
    "broken": {2: "a barrier"},
    "settles": True,
    "location": "layers.0.output",
    "value": ("tuple", [("leaf", 0), ("plain", None)]),
    "why": "",
}


@pytest.fixture
def liar() -> Any:
    made = Liar()
    yield made
    made.close()


def test_a_message_that_came_before_has_its_tensors_read_anew() -> None:
    memory, known = region(), Known()
    first = decode(encode(ANSWER, memory), memory, known)
    second = decode(encode({**ANSWER, "changed": {0: torch.full((2, 3), 7.0)}}, memory), memory, known)
    assert known.find(encode(ANSWER, memory)) is not None
    assert torch.equal(first["changed"][0], torch.ones(2, 3))
    assert torch.equal(second["changed"][0], torch.full((2, 3), 7.0))
    assert first["waits"] == second["waits"] == ANSWER["waits"]


def test_a_message_that_came_before_gives_containers_of_its_own() -> None:
    memory, known = region(), Known()
    first, second = (decode(encode(ANSWER, memory), memory, known) for _ in range(2))
    first["skips"][0].append(2)
    first["changed"].clear()
    assert second["skips"] == [[1]] and list(second["changed"]) == [0]
    assert decode(encode(ANSWER, memory), memory, known)["skips"] == [[1]]


def test_flags_that_came_before_are_true_or_false_whatever_their_bytes_are() -> None:
    memory, known = region(), Known()
    data = encode([torch.tensor([True, False])], memory)
    for _ in range(2):
        memory.at(0, 2).fill_(255)
        [flags] = decode(data, memory, known)
        assert flags.dtype == torch.bool and flags.view(torch.uint8).tolist() == [1, 1]


def test_a_text_in_the_shared_memory_is_read_anew() -> None:
    memory, known = region(), Known()
    assert decode(encode(["a" * 9000], memory), memory, known) == ["a" * 9000]
    data = encode(["b" * 9000], memory)
    assert known.find(data) is None
    assert decode(data, memory, known) == ["b" * 9000]


def test_few_messages_are_kept() -> None:
    memory, known = region(), Known()
    for number in range(10_000):
        decode(encode(number, memory), memory, known)
    assert len(known._makes) == codec._KNOWN
    assert decode(encode("x" * 2000, memory), memory, known) == "x" * 2000
    assert known.find(encode("x" * 2000, memory)) is None


def test_bytes_of_any_kind_mean_the_same_when_they_come_again() -> None:
    memory, draw, known = region(), random.Random(7), Known()
    real = [encode(value, memory) for value in VALUES]
    read = 0
    for _ in range(5_000):
        data = bytearray(draw.choice(real))
        data[draw.randrange(len(data))] = draw.randrange(256)
        outcomes = []
        for one in (None, known, known):
            try:
                outcomes.append(repr(decode(bytes(data), memory, one)))
            except Malformed:
                outcomes.append("malformed")
        assert outcomes[0] == outcomes[1] == outcomes[2]
        read += outcomes[0] != "malformed"
    assert read > 500


@pytest.mark.parametrize("given", [[], [torch.arange(6).view(2, 3).t()], [torch.ones(2, dtype=torch.bfloat16)]])
def test_a_turn_comes_as_it_went(given: list[torch.Tensor]) -> None:
    memory = region()
    data = encode_turn({**TURN, "tensors": given}, memory)
    assert data is not None
    for came in (decode_turn(data, memory), decode_turn(encode({**TURN, "tensors": given}, memory), memory)):
        tensors = came.pop("tensors")
        assert came == TURN
        assert [(one.dtype, one.tolist()) for one in tensors] == [(one.dtype, one.tolist()) for one in given]


@pytest.mark.parametrize(
    "other",
    [
        {"value": ("plain", numpy.float64(2.5))},
        {"value": ("new", torch.ones(2))},
        {"error": ("Refusal", 1, numpy.str_("text"), "", [])},
        {"result": {"text": numpy.int64(1)}},
        {"tensors": [torch.ones(2).to_sparse()]},
        {"tensors": [torch.ones(2, device="meta")]},
    ],
)
def test_a_turn_with_other_values_goes_the_checked_way(other: dict[str, Any]) -> None:
    memory = region()
    told = {**TURN, "tensors": [], **other}
    assert encode_turn(told, memory) is None
    with contextlib.suppress(Refusal):
        encode(told, memory)


def test_turns_of_two_processes_pass_at_the_same_time(liar: Liar) -> None:
    other = Liar()
    try:
        mediators = block(liar), block(other)
        for one, mediator in zip((liar, other), mediators, strict=True):
            one.answers(lambda end: end.send(Kind.ANSWER, {"waits": ("", "step", 1, "")}))
            mediator.begin_step()
            mediator.start()
            mediator.begin_step()
        order: list[str] = []
        second = other.end

        def first_answers(end: ChildEnd) -> None:
            second.next()  # the second process was asked before the first one answers
            order.append("both were asked")
            end.send(Kind.ANSWER, DONE)
            second.send(Kind.ANSWER, DONE)

        liar.answers(first_answers)
        assert all(mediator.own_process for mediator in mediators)
        for end in [mediator.begin_resume(True) for mediator in mediators]:
            end()
        assert order == ["both were asked"]
        assert [mediator.state.ending.ended for mediator in mediators] == ["done", "done"]
        assert all(mediator.state.ending.failure is None for mediator in mediators)
    finally:
        other.close()


def test_a_block_that_was_told_of_a_step_goes_on_in_that_step(liar: Liar) -> None:
    mediator = block(liar)
    liar.answers(lambda end: end.send(Kind.ANSWER, {"waits": ("", "step", 1, "")}))
    mediator.begin_step()
    mediator.start()
    liar.answers(lambda end: end.send(Kind.ANSWER, DONE))
    mediator.announce()
    mediator.begin_step()
    mediator.resume(True)
    assert mediator.state.ending.ended == "done"


def test_a_block_that_was_told_of_a_step_that_does_not_begin_fails(liar: Liar) -> None:
    mediator = block(liar)
    liar.answers(lambda end: end.send(Kind.ANSWER, {"waits": ("", "step", 1, "")}))
    mediator.begin_step()
    mediator.start()
    liar.answers(lambda end: end.send(Kind.ANSWER, DONE))
    mediator.announce()
    mediator.finish(None)
    failure = mediator.state.ending.failure
    assert failure is not None and "has not begun" in failure.message
    assert not liar.process.open


def test_a_block_that_waits_for_no_step_is_not_told_of_one(liar: Liar) -> None:
    mediator = block(liar)
    liar.answers(lambda end: end.send(Kind.ANSWER, {"waits": ("", "step", 2, "")}))
    mediator.begin_step()
    mediator.start()
    mediator.announce()
    assert liar.process._number == 1


def test_a_block_may_start_before_its_first_step_has_begun(liar: Liar) -> None:
    mediator = block(liar)
    liar.answers(lambda end: end.send(Kind.ANSWER, DONE))
    mediator.announce()
    assert liar.process._number == 1
    mediator.begin_step()
    mediator.start()
    assert mediator.state.ending.ended == "done" and liar.process._number == 1


def test_a_block_that_was_told_of_its_first_step_can_be_cancelled(liar: Liar) -> None:
    mediator = block(liar)
    liar.answers(lambda end: None)
    mediator.announce()
    mediator.cancel()
    assert mediator.state.ending.ended == "cancelled" and not liar.process.open


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the worker take the machine for one with cores to spare."""
    monkeypatch.setattr(spare.Spare, "there", lambda self, processes: True)


@pytest.mark.usefixtures("many_cores")
def test_a_block_has_the_same_values_where_nobody_sleeps(processes: Pool) -> None:
    source = (
        "kept = []\nfor step in tracer.iter[:]:\n    kept.append(model.layers[0].output[0].sum().item())\nkept.save()"
    )
    ran = [Worker(processes).run(source, steps=4, trusted=trusted) for trusted in (True, False)]
    assert ran[1].failure is None and ran[0].saved == ran[1].saved and len(ran[1].saved["kept"]) == 4


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("number", [0, 1, 5, MOST_NUMBER])
def test_what_a_process_writes_in_the_place_of_its_number_changes_nothing(liar: Liar, number: int) -> None:
    mediator = block(liar)

    def answer(end: ChildEnd) -> None:
        end.send(Kind.ANSWER, DONE)
        end._shared.sent_up[0] = number

    for _ in range(2):
        liar.process._shared.sent_up[0] = number
    liar.answers(answer)
    mediator.start()
    assert mediator.state.ending.ended == "done"
    assert liar.process._shared.waits_awake[0] == 1


def test_there_are_no_cores_to_spare_on_a_small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "_cores", lambda: 4)
    assert not spare.Spare().there(1)
    monkeypatch.setattr(spare, "_cores", lambda: 16)
    assert not spare.Spare().there(13)
