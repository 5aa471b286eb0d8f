"""Rows of one tensor as an item of a list are sent as the items that they are, without a look at each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.saves import rows as rows_module
from executor.saves.collect import Limits, collect
from executor.saves.rows import Rows, can_be_sent, cut
from interpose.wire import stacks
from tests.unit.executor.saves.test_stacked_saves import same
from tests.unit.executor.saves.tracing import Trace, sent


def tensor(count: int = 40, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:  # [count, ...]
    shape = shape or (1, 8)
    return torch.arange(count * int(np.prod(shape))).reshape(count, *shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("inline", [0, 16, 1 << 20])
def test_a_list_with_rows_is_the_list_of_the_tensors(dtype: torch.dtype, inline: int) -> None:
    one, two, first = tensor(40, dtype=dtype), tensor(3, 5, dtype=dtype), torch.ones(4, 8).to(dtype)
    given = [first, *cut(one), "x", *cut(two)]
    meant = [first, *one.unbind(0), "x", *two.unbind(0)]
    message = sent(Trace(), inline_bytes=inline, x=given, y={"a": [given, 1]})
    got = message.names()
    assert same(got["x"], meant) and got["y"]["a"][0] is got["x"]
    without_torch = message.names("numpy")["x"]
    assert len(without_torch) == len(meant)
    for mine, theirs in zip(without_torch, meant, strict=True):
        assert (
            mine == theirs if isinstance(theirs, str) else np.array_equal(mine.astype(float), theirs.double().numpy())
        )


def test_a_list_with_rows_for_a_client_that_leaves_its_tensors_on_the_server() -> None:
    one = tensor()
    got = sent(Trace(remote=True), x=list(cut(one)))
    [stack] = [value.stack for value in got.saves.objects.values if value.HasField("stack")]
    assert stack.blob.size == one.nbytes and not stack.small


def test_the_bytes_are_those_of_the_rows() -> None:
    one, trace = tensor(), Trace()
    found: list[memoryview] = []
    value = list(cut(one))
    trace.registry.mark(value, value)
    collect(trace, 0, {"x": value}, {}, Limits(0, 1 << 40), lambda _, data: found.append(data))
    [data] = found
    assert np.frombuffer(data, np.uint8).ctypes.data == one.data_ptr() and trace.saved_bytes == one.nbytes


def test_a_list_with_saved_rows_is_sent() -> None:
    trace, items = Trace(), list(cut(tensor()))
    trace.registry.mark_all(items)
    [event] = collect(trace, 0, {"x": [1, items]}, {}, Limits(16, 1 << 40), lambda _, data: None)
    assert event.saves.names[0].name == "x"
    assert collect(trace, 0, {"x": list(cut(tensor()))}, {}, Limits(16, 1 << 40), lambda _, data: None) == []


def test_rows_count_as_saved_bytes() -> None:
    trace, value = Trace(), list(cut(tensor()))
    trace.registry.mark(value, value)
    [event] = collect(trace, 0, {"x": value}, {}, Limits(16, 1000), lambda _, data: None)
    assert "may" in event.failed.message and "more than the 0 MiB" in event.failed.message


def test_a_stack_has_no_more_bytes_than_a_message_may_have_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_STACK_BYTES", 10 * 32)
    one = tensor(37)
    items = list(cut(one))
    assert [len(item.tensor) for item in items] == [10, 10, 10, 7] and all(type(item) is Rows for item in items)
    got = sent(Trace(), x=items)
    assert same(got.names()["x"], list(one.unbind(0)))
    assert sum(kind == "stack" for kind in got.kinds) == 4


@pytest.mark.parametrize(
    ("one", "can"),
    [
        (tensor(1), True),
        (torch.zeros(0, 3), False),
        (torch.zeros(3, 0), False),
        (torch.zeros(3, 8)[:, ::2], False),
        (torch.zeros(3, dtype=torch.complex64), False),
        (torch.zeros(3, device="meta"), False),
        (torch.zeros(2, (stacks.MAX_ARRAY_BYTES >> 2) + 1), False),
        (torch.zeros(5), True),
    ],
)
def test_what_a_stack_cannot_have_is_no_rows(one: torch.Tensor, can: bool) -> None:
    assert can_be_sent(one) is can
    if can:
        assert same(sent(Trace(), x=list(cut(one))).names()["x"], list(one.unbind(0)))
