"""The state of the process is read in two ways, which say the same."""

from __future__ import annotations

import sys

import pytest
import torch

from executor.block import process_state
from executor.block.process_state import TURN, now, read


def test_the_fast_way_reads_what_the_table_reads() -> None:
    assert now() == read(TURN)
    assert process_state._unchanged(now(), read(TURN))


def test_the_fast_way_sees_modes_and_autocast() -> None:
    before = now()
    with torch.autocast("cpu"), torch.device("meta"):
        inside = now()
        assert inside == read(TURN)
    assert not process_state._unchanged(inside, before)
    assert process_state._unchanged(now(), before)


def test_the_code_of_an_object_does_not_run_when_states_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    before = now()
    monkeypatch.setattr(sys, "displayhook", Odd())
    assert not process_state._unchanged(now(), before)
    assert not process_state._unchanged(before, now())
