"""Values of any dtype lie in the output bit by bit, and come back."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from executor.graphs.buffers import Outputs
from executor.graphs.emitted import Emitted, elements_of, packed, unpacked
from executor.graphs.operations import ALL, Code, Refused, Tap
from executor.graphs.tables import LATER, PROMPT, Tables
from executor.graphs.tickets import PlainCopier
from tests.unit.executor.graphs import program_rows
from tests.unit.executor.graphs.rides import in_hooks, in_own_rows
from tests.unit.executor.graphs.samples import CPU, LIMITS

OUTPUTS = [torch.bfloat16, torch.float16, torch.float32]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.int32,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 100
    return made > 0 if dtype == torch.bool else made.abs().to(dtype)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 5), (2, 3, 1), (0,)])
def test_values_come_back_bit_by_bit(shape: tuple[int, ...]) -> None:
    for of, dtype in itertools.product(OUTPUTS, DTYPES):
        values = numbers((4, *shape), dtype)
        lines = packed(values, of)
        assert lines.dtype == of and lines.shape == (4, elements_of(shape, dtype, of))
        within = torch.zeros(4, lines.shape[1] + 3, dtype=of)
        within[:, 1:-2] = lines
        for steps in (4, 1):
            back = unpacked(within[:steps, 1:-2], shape, dtype)
            assert back.dtype == dtype and torch.equal(back, values[:steps])


def test_values_whose_elements_do_not_lie_in_order_are_packed_in_order() -> None:
    values = torch.arange(24.0).view(2, 3, 4).transpose(1, 2)
    assert torch.equal(unpacked(packed(values, torch.bfloat16), (4, 3), torch.float32), values)


def tables_with(taps: list[Tap], emitted: Emitted | None) -> Tables:
    tables = Tables((4,), 3, 8, torch.bfloat16, CPU, LIMITS)
    tables.join(1, "a", taps, 2, emitted)
    return tables


FORMS = (((3,), torch.int64), ((), torch.bool), ((2, 2), torch.bfloat16))
EMITTED = Emitted(7, (2, 4), FORMS)


def test_a_program_is_open_in_its_steps_alone() -> None:
    tables = tables_with([Tap(0, Code.READ, (0, 4), steps=(1, 3))], EMITTED)
    opened, numbers_ = [], []
    for step in range(5):
        later, _ = tables.begin_step([(1, 1), (0, 1)], {1: step}, 3)
        offset, number = tables.open_rows[0].tolist()
        opened.append(number)
        parts = later.shares[1].parts if later.shares else ()
        numbers_.append([part.tap for part in parts])
        if number:
            assert offset == later.shares[1].start
        else:
            assert offset == tables.scratch
    assert opened == [0, 0, 7, 7, 0]
    assert numbers_ == [[], [0], [1, 2, 3, 0], [1, 2, 3], []]
    tables.leave(1)
    tables.begin_step([(1, 1)], {}, 1)
    assert (tables.open_rows == torch.tensor([tables.scratch, 0])).all()


def test_taps_and_values_of_a_program_are_collected_by_their_numbers() -> None:
    tables = tables_with([Tap(0, Code.READ, (0, 4))], Emitted(7, (1, ALL), FORMS))
    outputs = Outputs(tables, PlainCopier(), 2 * 2 * tables.split, 1 << 20)
    values = [
        (numbers((3,), torch.int64) + step, numbers((), torch.bool), numbers((2, 2), torch.bfloat16))
        for step in range(3)
    ]
    for step in range(3):
        outgoing = tables.begin_step([(1, 1)], {1: step + 1}, 1)
        outputs.before(outgoing)
        offset = int(tables.open_rows[0, 0])
        for value in values[step]:
            line = packed(value[None], torch.bfloat16)[0]
            tables.output[offset : offset + len(line)] = line
            offset += len(line)
        tables.output[offset : offset + 4] = float(step)
        outputs.ring.append()
        outputs.after(outgoing, {1: "x"})
    found = outputs.collect("x")
    for i in range(3):
        stacked = found.stacked(1 + i)
        assert stacked is not None and torch.equal(stacked, torch.stack([value[i] for value in values]))
    assert [float(one[0, 0]) for one in found.steps_of(0)] == [0.0, 1.0, 2.0]


def test_a_program_without_values_writes_nothing() -> None:
    tables = tables_with([], Emitted(7, (0, ALL), ()))
    later, _ = tables.begin_step([(1, 1)], {1: 1}, 1)
    assert tables.open_rows[0].tolist() == [tables.scratch, 7] and not later.shares
    assert tables._areas[LATER].used == 0


def test_a_program_is_for_steps_of_one_row() -> None:
    tables = tables_with([], EMITTED)
    tables.begin_step([(1, 2)], {1: 0}, 2)
    with pytest.raises(Refused, match="2 rows of a request whose program is for one"):
        tables.begin_step([(1, 2)], {1: 2}, 2)


@pytest.mark.parametrize("where", [in_hooks, in_own_rows])
@pytest.mark.parametrize("name", program_rows.TEXTS)
def test_a_prompt_s_rows_are_as_so_many_requests(name: str, where: program_rows.Run) -> None:
    program_rows.check(program_rows.TEXTS[name], where)


def test_a_program_in_a_prompt_is_for_all_of_it() -> None:
    tables = tables_with([], replace(EMITTED, steps=(0, ALL), prompt=(1, 2)))
    assert tables._areas[PROMPT].used == tables._areas[LATER].used == EMITTED.elements(torch.bfloat16)
    tables.begin_step([(0, 3), (1, 2)], {1: 0}, 5)
    assert tables.open_rows[:5, 1].tolist() == [0, 0, 0, 0, 7]
    tables.blank(5)
    assert (tables.open_rows == torch.tensor([tables.scratch, 0])).all()
    tables.begin_step([(1, 1)], {1: 1}, 1)
    assert tables.open_rows[0, 1] == 7 and not tables._areas[PROMPT].used


def test_memory_is_given_back() -> None:
    tables = tables_with([], EMITTED)
    assert tables._areas[LATER].used == EMITTED.elements(torch.bfloat16) == 12 + 1 + 4
    tables.leave(1)
    assert tables._areas[LATER].used == 0
