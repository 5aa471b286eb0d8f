"""Saved containers of tensors: one stack, with the values and identities that the tensors had when they were saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from executor.model.layouts import WHOLE
from executor.model.rows import Rows
from executor.model.values import Served
from executor.saves import encoder
from executor.saves.collect import Limits, collect
from interpose.contract.cache import Cache, Visit
from interpose.v1.value_pb2 import DTYPE_FLOAT32, RemoteTensor, TensorView
from interpose.wire import stacks
from tests.unit.executor.saves.tracing import Trace, sent


def rows(count: int, *, first: int = 0, width: int = 8) -> list[torch.Tensor]:
    return [torch.arange(width, dtype=torch.float32).reshape(1, width) + 100 * (first + i) for i in range(count)]


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal, tensors to the bit."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


CONTAINERS = {
    "list": lambda: rows(5),
    "tuple": lambda: tuple(rows(5)),
    "steps of layers": lambda: [rows(4, first=10 * step) for step in range(6)],
    "layers of steps": lambda: {layer: rows(6, first=10 * layer) for layer in range(4)},
    "a dict": lambda: {f"layer {i}": row for i, row in enumerate(rows(5))},
    "tuples": lambda: [(row, i) for i, row in enumerate(rows(5))],
    "a prompt and steps": lambda: [torch.ones(7, 8), *rows(5)],
    "numbers": lambda: [torch.tensor(float(i)) for i in range(5)],
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_a_container_is_one_stack(name: str, inline_bytes: int) -> None:
    value = CONTAINERS[name]()
    got = sent(Trace(), x=value, inline_bytes=inline_bytes)
    assert got.kinds.count("stack") == 1 and "tensor" not in got.kinds
    assert len(got.blobs) == (inline_bytes == 0)
    assert same(got.names()["x"], value)


def test_a_list_is_a_few_bytes_beside_its_tensors() -> None:
    got = sent(Trace(), x=rows(2048), inline_bytes=0)
    assert got.saves.ByteSize() < 200 and [len(data) for data in got.blobs.values()] == [2048 * 32]


def test_each_layout_has_a_stack() -> None:
    value = [*rows(3), *[row.bfloat16() for row in rows(3)], *rows(3, width=5), np.ones((1, 8)), np.zeros((2, 8))]
    got = sent(Trace(), x=value)
    assert got.kinds.count("stack") == 4 and "tensor" not in got.kinds
    back = got.names()["x"]
    assert same(back[:9], value[:9])
    assert all(
        isinstance(one, np.ndarray) and np.array_equal(one, two) for one, two in zip(back[9:], value[9:], strict=True)
    )


def test_a_client_without_torch_gets_arrays() -> None:
    value = [row.bfloat16() for row in rows(4)]
    back = sent(Trace(), x=value).names(library="numpy")["x"]
    assert [one.dtype.name for one in back] == ["bfloat16"] * 4
    assert all((one.astype("float32") == two.float().numpy()).all() for one, two in zip(back, value, strict=True))


def test_a_client_that_cannot_read_stacks_gets_tensors() -> None:
    value = [rows(4), {"a": rows(2)}]
    got = sent(Trace(stacks=False), x=value)
    assert not {"stack", "stacked"} & set(got.kinds) and got.kinds.count("tensor") == 6
    assert b"stacked" not in str(got.saves).encode() and same(got.names()["x"], value)


def test_a_tensor_in_two_places_is_one_tensor() -> None:
    one, two, three = rows(3)
    back = sent(Trace(), x=[one, two, one, {"a": one, "b": (two, three)}], y=[three, three]).names()
    x, y = back["x"], back["y"]
    assert x[0] is x[2] is x[3]["a"] and x[1] is x[3]["b"][0] and x[3]["b"][1] is y[0] is y[1]
    x[0] += 1
    assert torch.equal(x[1], two) and torch.equal(y[0], three)


def test_a_tensor_that_has_a_name_is_an_entry_of_its_own() -> None:
    one, *others = rows(4)
    got = sent(Trace(), invoke=-1, one=one, x=[one, *others])
    assert [binding.value.WhichOneof("kind") for binding in got.saves.names] == ["ref", "ref"]
    back = got.names()
    assert back["x"][0] is back["one"] and same(back["x"], [one, *others])


def test_a_tensor_alone_is_no_stack() -> None:
    got = sent(Trace(), x=[torch.ones(1, 3), torch.ones(1, 4)], y=torch.ones(2))
    assert "stack" not in got.kinds and got.kinds.count("tensor") == 3


def test_a_list_that_holds_itself() -> None:
    value: list[Any] = rows(3)
    value.insert(1, value)
    back = sent(Trace(), x=value).names()["x"]
    assert back[1] is back and same([back[0], *back[2:]], [value[0], *value[2:]])


def test_a_cache_is_one_stack() -> None:
    cache = Cache({f"layers.{i}": [Visit(output=(row, None)) for row in rows(3, first=10 * i)] for i in range(4)})
    got = sent(Trace(), cache=cache)
    assert got.kinds.count("stack") == 1 and "tensor" not in got.kinds
    back = got.names()["cache"]
    for i in range(4):
        assert same(back[f"layers.{i}"].output, [(row, None) for row in rows(3, first=10 * i)])


def test_what_was_saved_is_what_it_was_at_that_moment() -> None:
    """The model writes over what a block was served; a snapshot keeps what was there when it was saved."""
    trace = Trace()
    kept = []
    engine = torch.zeros(1, 8)
    for step in range(6):
        engine.fill_(step)
        served = Served("layer.output", engine, Rows(0, 1, 1, 1), lambda path: WHOLE)
        kept.append(trace.registry.save(served.value, served))
        kept.append(trace.registry.save((served.value * 2)[0], served))
        served.value.fill_(-1)  # as the block goes on
    got = sent(trace, x=kept)
    back = got.names()["x"]
    assert got.kinds.count("stack") == 2
    assert [float(one.sum()) for one in back[::2]] == [8.0 * step for step in range(6)]
    assert [float(one.sum()) for one in back[1::2]] == [16.0 * step for step in range(6)]


def test_names_for_one_served_value() -> None:
    """A value saved twice, changed in between: each alias has its own snapshot, the value itself has the later one."""
    trace = Trace()
    served = Served("layer.output", torch.zeros(1, 4), Rows(0, 1, 1, 1), lambda path: WHOLE)
    first = trace.registry.save(served.value, served)
    served.value += 1
    second = trace.registry.save(served.value, served)
    served.value += 1
    back = sent(trace, x=[first, second, served.value]).names()["x"]
    assert [float(one[0, 0]) for one in back] == [0, 1, 1] and back[1] is back[2]


def test_a_tensor_of_an_earlier_trace_stays_where_it_is() -> None:
    whole = torch.arange(8.0).reshape(1, 8)
    trace = Trace(uploads={"kept": whole.numpy().tobytes()})
    remote = RemoteTensor(blob_id="kept", view=TensorView(dtype=DTYPE_FLOAT32, shape=[1, 8]))
    earlier, changed = trace.earlier.tensor(remote), trace.earlier.tensor(remote)
    changed += 1
    got = sent(trace, x=[*rows(2), earlier, changed])
    assert sorted(kind for kind in got.kinds if kind) == ["list", "remote", "stack", "tensor"]


def test_several_invokes_do_not_share_bytes() -> None:
    trace = Trace(expected=2)
    value = rows(3)
    got = sent(trace, x=value, inline_bytes=0)
    value[1].zero_()
    assert same(got.names()["x"], rows(3))


def test_tensors_on_the_server_are_blobs() -> None:
    got = sent(Trace(remote=True), x=rows(3), inline_bytes=1 << 20)
    assert len(got.blobs) == 1 and got.saves.objects.values[0].stack.HasField("blob")


@pytest.mark.parametrize("most", [100, 1000])
def test_small_and_large_tensors_are_in_stacks_of_their_own(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "INLINE_STACK_BYTES", most)
    value = [*rows(3), *[torch.ones(40, 8) + i for i in range(2)], *rows(2)]
    got = sent(Trace(), x=value, inline_bytes=100)
    found = [one.stack for one in got.saves.objects.values if one.HasField("stack")]
    assert [(stack.count, stack.small) for stack in found] == [(5, True), (2, False)]
    assert [stack.HasField("blob") for stack in found] == [most == 100, True]
    assert same(got.names()["x"], value)


def test_small_tensors_that_a_session_keeps_are_inside_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "INLINE_STACK_BYTES", 100)
    value = [*rows(50), torch.ones(40, 8), torch.zeros(40, 8)]
    got = sent(Trace(of_session=True), invoke=-1, x=value, inline_bytes=100)
    found = [one.stack for one in got.saves.objects.values if one.HasField("stack")]
    assert [(stack.count, stack.HasField("blob")) for stack in found] == [(50, False), (2, True)]
    assert same(got.names()["x"], value)
    again = sent(Trace(of_session=True), invoke=0, x=value, inline_bytes=100)
    assert len(again.blobs) == 2, "what an invoke saves for itself is not the session's"


def test_more_than_a_trace_may_save() -> None:
    trace = Trace()
    value = trace.registry.save(rows(100), None)
    limits = Limits(1024, 1000)
    [event] = collect(trace, 0, {"x": value}, {}, limits, lambda *blob: pytest.fail("nothing is sent"))
    assert "'x' cannot be saved: the trace saved more than" in event.failed.message
    assert sent(Trace(), x=rows(31), limit=1000).saves.names


def test_saved_bytes_count_each_tensor_once() -> None:
    trace = Trace()
    one, *others = rows(5)
    sent(trace, x=[one, *others, one], y=one)
    assert trace.saved_bytes == 5 * 32


def test_a_tensor_that_cannot_travel_is_named() -> None:
    trace = Trace()
    value = trace.registry.save([*rows(3), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")], None)
    [event] = collect(trace, 0, {"x": value}, {}, Limits(1024, 1 << 30), lambda *blob: None)
    assert "only dense tensors can travel" in event.failed.message


def test_a_group_that_cannot_be_put_together_travels_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(members: list[Any]) -> memoryview:
        raise RuntimeError("not implemented for this dtype")

    monkeypatch.setattr(stacks, "packed", fails)
    got = sent(Trace(), x=rows(4))
    assert got.kinds.count("tensor") == 4 and same(got.names()["x"], rows(4))
