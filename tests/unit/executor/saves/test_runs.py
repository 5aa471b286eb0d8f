"""Lists of tensors that are the rows of one tensor: one stack, whose bytes are the tensor's own, and the same identities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.saves.collect import Limits, collect
from interpose.v1.value_pb2 import DTYPE_FLOAT32, RemoteTensor, TensorView
from interpose.wire.stacks import joined
from tests.unit.executor.saves.test_stacked_saves import same
from tests.unit.executor.saves.tracing import Trace, sent


def base(count: int = 40, *shape: int) -> torch.Tensor:  # [count, ...]
    shape = shape or (1, 8)
    return torch.arange(float(count * np.prod(shape))).reshape(count, *shape)


def stack_counts(got: Any) -> list[int]:
    return [value.stack.count for value in got.saves.objects.values if value.HasField("stack")]


def blobs(trace: Trace, value: Any) -> list[memoryview]:
    """The blobs of a saved value, as the outbox gets them."""
    found: list[memoryview] = []
    trace.registry.save(value, None)
    collect(trace, 0, {"x": value}, {}, Limits(0, 1 << 40), lambda _, data: found.append(data))
    return found


def address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def test_the_bytes_are_not_copied() -> None:
    rows = base()
    [data] = blobs(Trace(), list(rows.unbind(0)))
    assert address(data) == rows.data_ptr() and data.nbytes == rows.nbytes
    [data] = blobs(Trace(), list(rows.unbind(0))[3:])
    assert address(data) == rows[3:].data_ptr() and data.nbytes == rows[3:].nbytes
    data, _ = blobs(Trace(), [torch.zeros(5, 8), *rows.unbind(0)])
    assert address(data) == rows.data_ptr()


def test_several_invokes_do_not_share_bytes() -> None:
    rows = base()
    [data] = blobs(Trace(expected=2), list(rows.unbind(0)))
    assert address(data) != rows.data_ptr()


SHAPES: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "a list": list,
    "a tuple": tuple,
    "a slice": lambda rows: rows[1:-2],
    "every second": lambda rows: rows[::2],
    "backwards": lambda rows: rows[::-1],
    "a prompt first": lambda rows: [torch.zeros(7, 8), *rows],
    "something first and last": lambda rows: [3, "a", *rows, None],
    "steps of layers": lambda rows: [rows[at : at + 10] for at in range(0, 40, 10)],
    "layers of steps": lambda rows: {layer: rows[layer::4] for layer in range(4)},
    "tuples": lambda rows: [(i, row) for i, row in enumerate(rows)],
    "one again": lambda rows: [*rows, rows[3]],
    "overlapping lists": lambda rows: [rows, rows[1:], rows[:-1], list(rows)],
    "others among them": lambda rows: [*rows[:15], torch.ones(1, 8), *rows[15:]],
    "two tensors": lambda rows: [*rows, *base(20).unbind(0)],
    "a dict beside": lambda rows: [{"last": rows[-1]}, rows, {"first": rows[0]}],
    "a set beside": lambda rows: [rows, {rows[5]}],
    "views of views": lambda rows: [rows, [row[0] for row in rows], [row[:, :3] for row in rows]],
    "columns": lambda rows: list(base(8, 40).t().unbind(0)),
    "numbers": lambda rows: list(base(40).sum((1, 2)).unbind(0)),
    "half": lambda rows: list(base().bfloat16().unbind(0)),
    "complex": lambda rows: list(torch.complex(base(), base()).unbind(0)),
}


def tensors_of(value: Any, found: list[Any]) -> list[Any]:
    """The tensors of a value in their order, each time they come."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple | set):
        for one in value:
            tensors_of(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            tensors_of(one, found)
    return found


def pattern(value: Any) -> list[int]:
    """For each tensor of a value, the index of the first place of the same tensor."""
    ids = [id(one) for one in tensors_of(value, [])]
    return [ids.index(one) for one in ids]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_values_and_identities(name: str, inline_bytes: int) -> None:
    value = SHAPES[name](list(base().unbind(0)))
    got = sent(Trace(), x=value, inline_bytes=inline_bytes)
    back = got.names()["x"]
    if name != "a set beside":
        assert same(back, value)
    assert pattern(back) == pattern(value)
    one_by_one = sent(Trace(stacks=False), x=value, inline_bytes=inline_bytes).names()["x"]
    assert all(map(torch.equal, tensors_of(back, []), tensors_of(one_by_one, [])))
    tensors_of(back, [])[0].zero_()
    assert not tensors_of(value, [])[1].eq(0).all(), "the notebook's tensors are its own"


def test_how_many_stacks() -> None:
    rows = list(base().unbind(0))
    assert stack_counts(sent(Trace(), x=rows)) == [40]
    assert stack_counts(sent(Trace(), x=SHAPES["steps of layers"](rows))) == [40]
    assert stack_counts(sent(Trace(), x=[torch.zeros(7, 8), *rows])) == [40]
    got = sent(Trace(), x=SHAPES["steps of layers"](rows), y=rows[3:7])
    assert stack_counts(got) == [40] and got.kinds.count("tensor") == 0
    back = got.names()
    assert all(one is two for one, two in zip(back["y"], [*back["x"][0][3:7]], strict=True))


def test_a_tensor_with_a_name_is_the_one_in_the_list() -> None:
    rows = list(base().unbind(0))
    back = sent(Trace(), x=rows, last=rows[-1], other=torch.ones(2)).names()
    assert back["x"][-1] is back["last"] and same(back["x"], rows)
    assert stack_counts(sent(Trace(), x=rows, other=torch.ones(2))) == [40]


def change_data(rows: list[torch.Tensor]) -> None:
    rows[3].data = torch.ones(1, 8)


CHANGES: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "elements": lambda rows: rows[3].mul_(2),
    "through data": lambda rows: rows[3].data.mul_(2),
    "data": change_data,
    "data of another shape": lambda rows: setattr(rows[3], "data", rows[3].data.view(-1)),
    "data of another dtype": lambda rows: setattr(rows[3], "data", rows[3].data.view(torch.int32)),
    "data of other strides": lambda rows: setattr(rows[0], "data", torch.as_strided(rows[0].data, (1, 8), (8, 2))),
    "a squeeze": lambda rows: rows[3].squeeze_(),
    "a transposition": lambda rows: rows[3].t_(),
    "a smaller size": lambda rows: rows[3].resize_(1, 4),
    "another memory": lambda rows: rows[3].set_(torch.ones(1, 8)),
    "gradients": lambda rows: rows[3].requires_grad_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_tensor_is_what_it_is_now(name: str) -> None:
    trace, rows = Trace(), list(base().unbind(0))
    trace.registry.mark_all(rows)
    trace.registry.save(rows, None)
    CHANGES[name](rows)
    back = sent(trace, x=rows).names()["x"]
    assert all(one.dtype == two.dtype and torch.equal(one, two.detach()) for one, two in zip(back, rows, strict=True))


def test_snapshots_among_them() -> None:
    trace, rows = Trace(), list(base().unbind(0))
    alias, snapshot = rows[4].view_as(rows[4]), rows[4].clone()
    trace.registry.mark(alias, snapshot)
    alias.fill_(-1)
    back = sent(trace, x=[*rows[:4], alias, *rows[5:]]).names()["x"]
    assert same(back, list(base().unbind(0)))


def test_neighbours_in_memory_that_are_not_one_tensor() -> None:
    memory = np.zeros((40, 8), np.float32)
    apart = [torch.from_numpy(memory[i : i + 1].reshape(-1).copy()) for i in range(40)]
    assert joined(apart) is None
    halves = [*torch.from_numpy(memory[:20]).unbind(0), *torch.from_numpy(memory[20:]).unbind(0)]
    assert joined(halves) is None, "the memory of the first ends before the last"
    got = sent(Trace(), x=[halves[:20], halves[20:]])
    assert stack_counts(got) == [20, 20] and same(got.names()["x"], [halves[:20], halves[20:]])


def test_a_tensor_of_an_earlier_trace_among_them() -> None:
    trace = Trace(uploads={"kept": base().numpy().tobytes()})
    remote = RemoteTensor(blob_id="kept", view=TensorView(dtype=DTYPE_FLOAT32, shape=[40, 1, 8]))
    rows = list(trace.earlier.tensor(remote).unbind(0))
    assert same(sent(trace, x=rows).names()["x"], list(base().unbind(0)))


def test_more_than_a_stack_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from interpose.wire import stacks

    monkeypatch.setattr(stacks, "MAX_STACK_BYTES", 32 * 15)
    rows = list(base().unbind(0))
    got = sent(Trace(), x=rows, inline_bytes=0)
    assert stack_counts(got) == [15, 15, 10] and same(got.names()["x"], rows)
    assert got.saves.ByteSize() < 200


def test_more_than_a_trace_may_save() -> None:
    trace = Trace()
    value = trace.registry.save(list(base().unbind(0)), None)
    [event] = collect(trace, 0, {"x": value}, {}, Limits(0, 1000), lambda *blob: None)
    assert "'x' cannot be saved: the trace saved more than" in event.failed.message
    assert sent(Trace(), x=list(base().unbind(0)), limit=40 * 32).saves.names


def test_what_is_no_run() -> None:
    rows = list(base().unbind(0))
    assert joined(rows[:1]) is None and joined([]) is None and joined([np.ones(3), np.ones(3)]) is None
    assert joined([rows[0], torch.nn.Parameter(rows[1])]) is None
    assert joined([row[:0] for row in rows]) is None
    assert joined(list(torch.zeros(4, 2, device="meta").unbind(0))) is None
    assert joined([torch.zeros(2).to_sparse(), torch.zeros(2).to_sparse()]) is None
    one = joined(rows[2:9])
    assert torch.equal(one, base()[2:9]) and one.data_ptr() == rows[2].data_ptr()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 39), st.integers(1, 40)), max_size=12), st.booleans())
def test_any_lists_of_rows(pieces: list[tuple[int, int, int]], nested: bool) -> None:
    """Lists of pieces of tensors' rows: values and identities are those of the block."""
    sources = [
        list(base().unbind(0)),
        list((-base()).unbind(0)),
        list(base(40, 8).unbind(0)),
        list(base().half().unbind(0)),
    ]
    lists = [sources[which][first : first + count] for which, first, count in pieces]
    value: list[Any] = lists if nested else [one for some in lists for one in some]
    back = sent(Trace(), x=value).names()["x"]
    assert same(back, value) and pattern(back) == pattern(value)
