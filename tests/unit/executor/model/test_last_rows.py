"""Of a value over a whole prompt the last rows can be used, and no others: a wrong row is never given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.core.errors import Refusal
from executor.model.last_rows import LastRows, last_of

WHOLE = torch.arange(40.0).view(10, 4)


def rows(there: int, last: int) -> LastRows:
    return LastRows(WHOLE[10 - there :].clone(), 10, last, "blocks[0].resid_post")


WITHIN = [
    *(-1, -3, 7, 9, (-2, 1), (-1, slice(2)), (8, ...), (slice(-3, None), [0, 3]), (slice(-2, None), None, slice(1, 3))),
    *(slice(-3, None), slice(-2, -1), slice(7, 20), slice(-3, None, 2), slice(9, 8), slice(10, None)),
]
OUTSIDE = [
    *(-4, 0, 6, (0, 1), slice(None), slice(-4, None), slice(0, 0), slice(None, -1), slice(None, None, 2)),
    *(..., None, True, [-1], torch.tensor(-1), torch.tensor([9]), (), (..., 0), ([-1], 0), "x"),
    slice(torch.tensor(-1), None),
]


@pytest.mark.parametrize("there", [3, 5, 10])
@pytest.mark.parametrize("key", WITHIN)
def test_the_last_rows_are_those_of_the_whole_value(there: int, key: Any) -> None:
    value, whole = rows(there, 3), WHOLE.clone()
    assert torch.equal(value[key], whole[key])
    value[key] = -1.0
    whole[key] = -1.0
    assert torch.equal(value[-3:], whole[-3:])
    value[key] += 5
    whole[key] += 5
    assert torch.equal(value[-3:], whole[-3:])


@pytest.mark.parametrize("there", [3, 5, 10])
@pytest.mark.parametrize("key", OUTSIDE)
def test_other_rows_are_refused(there: int, key: Any) -> None:
    value = rows(there, 3)
    with pytest.raises(Refusal, match="may have come from the prefix cache"):
        value[key]
    with pytest.raises(Refusal, match="may have come from the prefix cache"):
        value[key] = 1.0


def test_an_index_past_the_end_and_a_step_backwards_are_errors_as_torch_has_them() -> None:
    value = rows(5, 3)
    for key in (10, -11, (12, 0)):
        with pytest.raises(IndexError, match="out of bounds for dimension 0 with size 10"):
            value[key]
    with pytest.raises(ValueError, match="step must be positive"):
        value[::-1]


def test_whatever_else_is_done_with_the_value_is_refused() -> None:
    value = rows(5, 3)
    for do in (
        lambda: value + 1,
        lambda: 1 - value,
        lambda: value * value,
        lambda: value @ WHOLE.T,
        lambda: WHOLE + value,
        lambda: torch.stack([value]),
        lambda: torch.relu(value),
        lambda: torch.nn.functional.linear(value, WHOLE),
        lambda: value.mean(0),
        lambda: value.save,
        lambda: value.clone(),
        lambda: list(value),
        lambda: bool(value),
        lambda: value > 0,
        lambda: -value,
    ):
        with pytest.raises(Refusal, match="the last 3 rows"):
            do()
    assert (value.shape, len(value), value.dtype, value.device.type) == ((10, 4), 10, torch.float32, "cpu")
    assert "last 3 rows of blocks[0].resid_post>" in repr(value)


def test_a_shape_that_is_not_known() -> None:
    value = LastRows(WHOLE, 10, 3, "h", sized=False)
    for do in (lambda: value.shape, lambda: len(value)):
        with pytest.raises(Refusal, match="the last 3 rows"):
            do()
    assert torch.equal(value[-2], WHOLE[-2])


def test_rows_that_are_not_there() -> None:
    for there, last in ((2, 3), (11, 3)):
        with pytest.raises(Refusal, match="in the step"):
            LastRows(torch.zeros(there, 4), 10, last, "h")


def test_tuples_of_values() -> None:
    found = last_of((WHOLE[5:], None, [WHOLE[5:]]), 10, 1, "layers.0.output")
    assert torch.equal(found[0][-1], WHOLE[-1]) and found[1] is None and torch.equal(found[2][0][9], WHOLE[-1])
    with pytest.raises(Refusal, match="the last row there"):
        found[0] = WHOLE
    with pytest.raises(Refusal, match=r"layers\.0\.output"):
        last_of({"a": WHOLE}, 10, 1, "layers.0.output")
