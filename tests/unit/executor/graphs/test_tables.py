"""Requests join and leave the tables, windows of steps open and close, and what does not fit is refused whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from executor.graphs import reference
from executor.graphs.buffers import Outputs
from executor.graphs.extents import Full
from executor.graphs.limits import MIB, GraphLimits
from executor.graphs.operations import ALL, Code, Refused, Tap
from executor.graphs.shares import Part
from executor.graphs.tables import Tables
from executor.graphs.tickets import PlainCopier
from tests.unit.executor.graphs.samples import CPU, LIMITS

WHOLE = (0, 4)
READ = Tap(0, Code.READ, WHOLE)


def tables_of(limits: GraphLimits = LIMITS) -> Tables:
    return Tables((4, 4), slots=3, rows=16, dtype=torch.float32, device=CPU, limits=limits)


def rows_after(tables: Tables, count: int, site: int = 0) -> list[float]:
    """Run a site on rows of zeros; return the first column."""
    values = torch.zeros(count, 4)
    reference.run_taps(tables, site, values)
    return values[:, 0].tolist()


def test_rows_say_the_slot_and_the_place_in_the_request() -> None:
    tables = tables_of()
    tables.begin_step([(2, 3), (0, 1), (1, 2)], {}, 8)
    assert tables.rows[6:8, 0].tolist() == [3, 3]
    assert tables.rows[:6].tolist() == [[2, 0], [2, 1], [2, 2], [0, 0], [1, 0], [1, 1]]
    tables.begin_step([(1, 1), (2, 1)], {}, 2)
    assert tables.rows[:2].tolist() == [[1, 0], [2, 0]]


def test_more_rows_than_the_tensors_have_are_an_error() -> None:
    with pytest.raises(ValueError, match="9 rows in tensors of 8"):
        tables_of().begin_step([(0, 9)], {}, 8)
    with pytest.raises(ValueError, match="tables for 16"):
        tables_of().begin_step([(0, 9)], {}, 32)


def test_a_tap_reaches_its_request_alone() -> None:
    tables = tables_of()
    tables.join(1, "a", [Tap(0, Code.ADD, WHOLE, number=5.0)], 2)
    tables.begin_step([(0, 1), (1, 2), (2, 1)], {1: 0}, 5)
    assert rows_after(tables, 5) == [0, 5, 5, 0, 0]
    assert rows_after(tables, 5, site=1) == [0, 0, 0, 0, 0]
    assert tables.sites == {0}


def test_requests_of_several_tenants_have_their_own_vectors() -> None:
    tables = tables_of()
    for slot, tenant in enumerate("abc"):
        tables.join(slot, tenant, [Tap(0, Code.ADD, WHOLE, vector=torch.full((4,), slot + 1.0))], 1)
    tables.begin_step([(2, 1), (0, 1), (1, 1)], {0: 4, 1: 0, 2: 9}, 4)
    assert rows_after(tables, 4) == [3, 1, 2, 0]


def test_a_request_that_left_has_no_taps_and_its_slot_is_free() -> None:
    tables = tables_of()
    tables.join(0, "a", [Tap(0, Code.ADD, WHOLE, vector=torch.ones(4)), READ], 3)
    tables.begin_step([(0, 3)], {0: 0}, 3)
    tables.leave(0)
    assert 0 not in tables and tables.bank.used == 0 and tables.sites == frozenset()
    later, prompt = tables.begin_step([(0, 3)], {}, 3)
    assert rows_after(tables, 3) == [0, 0, 0]
    assert not later.shares and not prompt.shares
    tables.join(0, "b", [Tap(1, Code.ADD, WHOLE, number=2.0)], 1)
    tables.begin_step([(0, 1)], {0: 0}, 1)
    assert rows_after(tables, 1) == [0] and rows_after(tables, 1, site=1) == [2]


def test_taps_of_later_steps_take_no_room_for_the_prompt() -> None:
    tables = tables_of()
    tables.join(0, "a", [replace(READ, steps=(1, ALL)), Tap(0, Code.ADD, WHOLE, number=1.0, steps=(1, ALL))], 5)
    later, prompt = tables.begin_step([(0, 5)], {0: 0}, 5)
    assert rows_after(tables, 5) == [0] * 5 and not later.shares and not prompt.shares
    later, prompt = tables.begin_step([(0, 1)], {0: 1}, 1)
    assert rows_after(tables, 1) == [1] and later.shares.keys() == {0} and not prompt.shares


def test_rows_of_a_prompt_are_read_in_its_step_and_one_row_in_each_later() -> None:
    tables = tables_of()
    tables.join(0, "a", [READ, replace(READ, rows=(4, 5), steps=(0, 1))], 5)
    later, prompt = tables.begin_step([(0, 5)], {0: 0}, 5)
    assert not later.shares and [(part.rows, part.at) for part in prompt.shares[0].parts] == [(5, 0), (1, 20)]
    later, prompt = tables.begin_step([(0, 1)], {0: 1}, 1)
    assert not prompt.shares and [(part.tap, part.rows) for part in later.shares[0].parts] == [(0, 1)]


def test_windows_open_and_close() -> None:
    tables = tables_of()
    taps = [Tap(0, Code.ADD, WHOLE, number=1.0, steps=(1, 3)), Tap(0, Code.ADD, WHOLE, number=10.0, steps=(2, ALL))]
    tables.join(0, "a", taps, 1)
    seen = []
    for step in range(5):
        tables.begin_step([(0, 1)], {0: step}, 1)
        seen.append((rows_after(tables, 1)[0], bool(tables.sites)))
    assert seen == [(0, False), (1, True), (11, True), (10, True), (10, True)]


def test_a_step_that_changes_no_tap_uploads_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = tables_of()
    tables.join(0, "a", [Tap(0, Code.ADD, WHOLE, number=1.0, steps=(0, 3))], 1)
    copied: list[tuple[int, ...]] = []
    plain = Tables._copy

    def noted(target: torch.Tensor, values: npt.NDArray[np.int32]) -> None:
        copied.append(tuple(target.shape))
        plain(target, values)

    monkeypatch.setattr(Tables, "_copy", staticmethod(noted))
    for step in range(5):
        tables.begin_step([(0, 1)], {0: step}, 1)
    record = (tables.length,)
    assert copied == [record, (1, 2), (1,), record]  # the same rows are not uploaded again


def test_rows_of_a_request_are_chosen_from_its_own_first_row() -> None:
    tables = tables_of()
    vectors = torch.tensor([[1.0] * 4, [2.0] * 4])
    tables.join(1, "a", [Tap(0, Code.SET, WHOLE, rows=(1, 3), vector=vectors, steps=(0, 1))], 4)
    tables.begin_step([(0, 2), (1, 4)], {1: 0}, 6)
    assert rows_after(tables, 6) == [0, 0, 0, 1, 2, 0]


def test_what_is_read_of_a_prompt_and_of_later_steps() -> None:
    tables = tables_of()
    last = Tap(1, Code.READ, (1, 3), rows=(2, 3))
    tables.join(0, "a", [last, READ], 3)
    later, prompt = tables.begin_step([(0, 3)], {0: 0}, 3)
    assert not later.shares and prompt.top == 14
    assert prompt.shares[0].parts == (Part(1, 0, 3, 4), Part(0, 12, 1, 2))
    later, prompt = tables.begin_step([(0, 1)], {0: 1}, 1)
    assert not prompt.shares and later.top == 4
    assert later.shares[0].parts == (Part(1, 0, 1, 4),)


def test_the_version_of_what_a_step_leaves_changes_with_its_shares() -> None:
    tables = tables_of()
    for slot in (0, 1):
        tables.join(slot, "a", [READ], 1)
    versions = []
    for batch in ([0], [0, 1], [0, 1], [1], [1], [0, 1]):
        later, _ = tables.begin_step([(slot, 1) for slot in batch], {0: 1, 1: 1}, 2)
        versions.append(later.version)
        assert set(later.shares) == set(batch)
    assert versions == [1, 2, 2, 3, 3, 4]


def test_the_range_of_a_prompt_is_free_after_the_prompt() -> None:
    limits = replace(LIMITS, prompt_bytes=3 * 4 * 4)
    tables = tables_of(limits)
    tables.join(0, "a", [READ], 3)
    tables.begin_step([(0, 3)], {0: 0}, 3)
    with pytest.raises(Full, match="output of prompts"):
        tables.join(1, "a", [READ], 2)
    assert 1 not in tables
    tables.begin_step([(0, 1)], {0: 1}, 1)
    tables.join(1, "a", [READ], 2)


def test_a_request_without_room_leaves_nothing_behind() -> None:
    tables = tables_of(replace(LIMITS, step_bytes=2 * 4 * 4))
    tables.join(0, "a", [READ], 1)
    with pytest.raises(Full, match="output of a step"):
        tables.join(1, "a", [Tap(0, Code.ADD, WHOLE, vector=torch.ones(4)), READ, Tap(1, Code.READ, WHOLE)], 1)
    assert tables.bank.used == 0
    tables.join(1, "a", [READ], 1)


@pytest.mark.parametrize(
    ("tap", "why"),
    [
        (Tap(2, Code.READ, WHOLE), "no site 2"),
        (Tap(0, Code.READ, (0, 5)), "columns 0:5 of a site with 4"),
        (Tap(0, Code.READ, (2, 2)), "columns 2:2"),
        (Tap(0, Code.READ, WHOLE, rows=(3, 3)), "rows 3:3"),
        (Tap(0, Code.READ, WHOLE, steps=(-1, 3)), "steps -1:3"),
        (Tap(0, Code.READ, WHOLE, vector=torch.ones(4)), "READ takes no vector"),
        (Tap(0, Code.ADD, WHOLE, vector=torch.ones(3)), r"shape \[3\]"),
        (Tap(0, Code.SET, WHOLE, rows=(0, 2), vector=torch.ones(3, 4)), r"\[3, 4\] for 2 rows"),
        (Tap(0, Code.ADD, WHOLE, vector=torch.ones(4).double()), "float64 for a model in torch.float32"),
        (Tap(0, Code.ADD, WHOLE, direction=torch.ones(4)), "takes no direction"),
        (Tap(0, Code.CLAMP, WHOLE, low=1.0, high=0.0), "bounds 1.0 and 0.0"),
        (Tap(0, Code.CLAMP, WHOLE, low=float("nan")), "bounds nan"),
        (Tap(0, Code.FORM, WHOLE), "needs a vector"),
        (Tap(0, Code.FORM, WHOLE, vector=torch.ones(4), coefficients=(0, 0, 1, 0)), "needs a direction"),
    ],
)
def test_taps_that_do_not_fit_are_refused(tap: Tap, why: str) -> None:
    tables = tables_of()
    with pytest.raises(Refused, match=why):
        tables.join(0, "a", [tap], 1)
    assert 0 not in tables and tables.bank.used == 0


def test_too_many_taps_are_refused() -> None:
    with pytest.raises(Refused, match="at most 24"):
        tables_of().join(0, "a", [READ] * 25, 1)


def test_a_slot_is_one_requests() -> None:
    tables = tables_of()
    tables.join(0, "a", [READ], 1)
    for slot in (0, 3, -1):
        with pytest.raises(ValueError, match="slot"):
            tables.join(slot, "a", [READ], 1)


def test_more_rows_than_the_prompt_had_are_refused() -> None:
    tables = tables_of()
    tables.join(0, "a", [READ], 2)
    with pytest.raises(Refused, match="3 rows of a request whose prompt had 2"):
        tables.begin_step([(0, 3)], {0: 0}, 3)
    tables.begin_step([(0, 1)], {0: 1}, 1)
    with pytest.raises(Refused, match="after the prompt"):
        tables.begin_step([(0, 2)], {0: 2}, 2)


def test_what_the_tables_take_is_what_the_limits_say() -> None:
    limits = GraphLimits(
        bank_bytes=MIB, step_bytes=MIB, ring_bytes=4 * MIB, prompt_bytes=2 * MIB, graph_bytes=0, program_bytes=0
    )
    tables = Tables((8,) * 5, slots=7, rows=33, dtype=torch.bfloat16, device=CPU, limits=limits)
    ring = Outputs(tables, PlainCopier(), limits.ring_bytes, MIB).ring.memory
    held = (
        tables.rows,
        tables.owners,
        tables.flags,
        tables.records,
        tables.open_rows,
        tables.output,
        tables.bank.values,
        ring,
    )
    assert sum(one.numel() * one.itemsize for one in held) == limits.device_bytes(slots=7, sites=5, rows=33)


def test_requests_with_the_very_same_taps_are_as_requests_with_equal_taps() -> None:
    """Their vectors are in the bank once for each tenant, and go with the last of them."""
    vector, direction = torch.ones(4) * 2, torch.ones(4)
    taps = (
        READ,
        Tap(0, Code.ADD, WHOLE, vector=vector, steps=(0, 3)),
        replace(READ, rows=(0, 1), steps=(1, ALL)),
        Tap(1, Code.FORM, WHOLE, vector=vector, direction=direction, coefficients=(1.0, 0.0, 1.0, 0.0)),
    )
    same, equal = tables_of(), tables_of()
    for tenants in ("aab", "bca", "aaa"):
        for tables, again in ((same, True), (equal, False)):
            for slot, tenant in enumerate(tenants):
                tables.join(slot, tenant, taps if again else tuple(map(replace, taps)), 2, again=again)
        assert same.bank.used == equal.bank.used
        for step, count in ((0, 2), (1, 1), (3, 1)):
            batch, steps = [(slot, count) for slot in range(3)], dict.fromkeys(range(3), step)
            shares = [
                [[one.shares for one in tables.begin_step(batch, steps, 3 * count)], tables.records.tolist()]
                for tables in (same, equal)
            ]
            assert shares[0] == shares[1]
        for tables in (same, equal):
            for slot in (1, 0, 2):
                tables.leave(slot)
            assert not tables.bank.used


def test_flags_of_an_earlier_request_are_lowered() -> None:
    tables = tables_of()
    for slots in ((0,), (0, 1, 2)):
        tables.flags.fill_(1)
        for slot in slots:
            tables.join(slot, "a", [Tap(0, Code.ADD, WHOLE, number=5.0)], 1, changes=True)
        tables.begin_step([(slot, 1) for slot in slots], dict.fromkeys(slots, 0), len(slots))
        assert tables.flags.tolist() == [0 if slot in slots else 1 for slot in range(4)]
        tables.flags.fill_(1)
        for slot in slots:
            tables.leave(slot)
    tables.join(0, "a", [Tap(0, Code.ADD, WHOLE, number=5.0)], 1, changes=True)
    tables.leave(0)
    assert tables.flags[0] == 0
