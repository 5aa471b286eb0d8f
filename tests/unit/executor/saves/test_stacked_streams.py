"""A streamed invoke sends the new tensors of a step as one stack, and the changes of tensors that were sent before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpose.contract.errors import EngineError
from interpose.results.assembly import Assembly
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import DTYPE_FLOAT32, Objects, Stack, StackSlice, Tensor, Value
from interpose.wire.resolver import Resolver
from tests.unit.executor.saves.test_stacked_saves import rows, same
from tests.unit.executor.saves.tracing import Streamed, Trace


def kinds(increment: pb.Increment) -> list[str | None]:
    return [value.WhichOneof("kind") for value in increment.objects.values]


def test_a_step_is_one_stack_wherever_its_tensors_go() -> None:
    trace = Trace()
    layers: dict[int, list[torch.Tensor]] = trace.registry.save({layer: [] for layer in range(16)}, None)
    flat: list[list[torch.Tensor]] = trace.registry.save([], None)
    streamed = Streamed(trace, "layers", "flat", inline_bytes=0)
    for step in range(5):
        new = rows(16, first=100 * step)
        for layer, row in enumerate(new):
            layers[layer].append(row)
        flat.append(new)
        increment = streamed.step(layers=layers, flat=flat)
        assert kinds(increment).count("stack") == 1 and "tensor" not in kinds(increment)
        assert same(streamed.names, {"layers": layers, "flat": flat})
    sizes = [increment.ByteSize() for increment in streamed.increments]
    assert max(sizes[2:]) - min(sizes[2:]) < 20, "each step sends its own tensors only"
    last = streamed.end(layers=layers, flat=flat)
    assert not last.objects.values and not last.patches
    assert streamed.names["flat"][3][2] is streamed.names["layers"][2][3]


def test_snapshots_are_not_looked_at_again() -> None:
    trace = Trace()
    kept: list[torch.Tensor] = trace.registry.save([], None)
    streamed = Streamed(trace, "kept")
    for row in rows(4):
        alias, snapshot = row.view_as(row), row.clone()
        trace.registry.mark(alias, snapshot)
        kept.append(alias)
    streamed.step(kept=kept)
    for row in kept:
        row.fill_(-1)
    assert not streamed.step(kept=kept).patches and not streamed.end(kept=kept).patches
    assert same(streamed.names["kept"], rows(4))


def test_changes_in_place_are_sent() -> None:
    trace = Trace()
    kept: list[torch.Tensor] = trace.registry.save(rows(6), None)
    streamed = Streamed(trace, "kept", inline_bytes=0)
    streamed.step(kept=kept)
    before = streamed.names["kept"][2]
    kept[2] += 1
    kept[5].zero_()
    kept[1] += 0
    increment = streamed.step(kept=kept)
    assert [patch.at for patch in increment.patches] == [2, 5]
    assert same(streamed.names["kept"], kept) and streamed.names["kept"][2] is before
    assert not streamed.step(kept=kept).patches
    kept[2] += 1
    assert [patch.at for patch in streamed.step(kept=kept).patches] == [2]
    kept[0].data[0, 0] = 7  # moves no version counter
    assert [patch.at for patch in streamed.end(kept=kept).patches] == [0]
    assert same(streamed.names["kept"], kept)


def test_arrays_that_count_no_changes_are_compared_in_each_step() -> None:
    trace = Trace()
    with torch.inference_mode():
        kept: list[Any] = [np.zeros(3), np.ones(3), torch.zeros(3), torch.ones(3)]
    trace.registry.save(kept, None)
    streamed = Streamed(trace, "kept")
    assert "stack" not in kinds(streamed.step(kept=kept))
    kept[0][1] = 5
    with torch.inference_mode():
        kept[3][2] = 9
    streamed.step(kept=kept)
    assert streamed.names["kept"][0].tolist() == [0, 5, 0] and streamed.names["kept"][3].tolist() == [1, 1, 9]


def test_another_shape_is_refused() -> None:
    trace = Trace()
    kept: list[torch.Tensor] = trace.registry.save(rows(3), None)
    streamed = Streamed(trace, "kept")
    streamed.step(kept=kept)
    kept[1].resize_(2, 4)
    streamed.end(kept=kept)
    assert streamed.stream.failure is not None and "another shape or type" in streamed.stream.failure.message


def test_a_client_that_cannot_read_stacks_gets_tensors() -> None:
    trace = Trace(stacks=False)
    kept: list[torch.Tensor] = trace.registry.save(rows(3), None)
    streamed = Streamed(trace, "kept")
    assert kinds(streamed.step(kept=kept)).count("tensor") == 3
    assert same(streamed.names["kept"], kept)


OPERATIONS = st.lists(
    st.sampled_from(
        ["append", "extend", "insert", "pop", "set", "change", "data", "again", "tuple", "dict", "sort", "step"]
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.randoms(use_true_random=False))
def test_the_notebook_has_what_the_block_has(operations: list[str], random: Any) -> None:
    """After each step of any block, the notebook's values are the block's."""
    trace = Trace()
    kept: list[Any] = trace.registry.save([], None)
    named: dict[Any, Any] = trace.registry.save({}, None)
    streamed = Streamed(trace, "kept", "named", inline_bytes=random.choice([0, 100]))
    made = 0

    def fresh() -> torch.Tensor:
        nonlocal made
        made += 1
        return torch.full((random.choice([1, 1, 1, 3]), 4), float(made))

    for operation in operations:
        tensors = [one for one in kept if isinstance(one, torch.Tensor)]
        if operation == "append":
            kept.append(fresh())
        elif operation == "extend":
            kept.extend([fresh(), fresh(), fresh()])
        elif operation == "insert":
            kept.insert(random.randint(0, len(kept)), fresh())
        elif operation == "tuple":
            kept.append((fresh(), fresh()))
        elif operation == "dict":
            named[random.randint(0, 3)] = [fresh(), fresh()]
        elif operation == "pop" and kept:
            kept.pop(random.randrange(len(kept)))
        elif operation == "set" and kept:
            kept[random.randrange(len(kept))] = fresh()
        elif operation == "again" and kept:
            kept.append(random.choice(kept))
        elif operation == "sort":
            kept.reverse()
        elif operation == "change" and tensors:
            random.choice(tensors).mul_(2)
        elif operation == "step":
            streamed.step(kept=kept, named=named)
            assert same(streamed.names, {"kept": kept, "named": named})
    for one in kept:
        if isinstance(one, torch.Tensor):
            one.data += 1
    streamed.end(kept=kept, named=named)
    assert same(streamed.names, {"kept": kept, "named": named})
    places = {id(mine): theirs for mine, theirs in zip(kept, streamed.names["kept"], strict=True)}
    assert all(places[id(mine)] is theirs for mine, theirs in zip(kept, streamed.names["kept"], strict=True))


def one_array() -> Tensor:
    return Tensor(dtype=DTYPE_FLOAT32, library=1, shape=[1, 2], data=bytes(8))


@pytest.mark.parametrize(
    "patch",
    [
        pb.Patch(index=0, at=2, tensor=one_array()),
        pb.Patch(index=1, at=0, tensor=one_array()),
        pb.Patch(index=9, at=0, tensor=one_array()),
        pb.Patch(index=0, tensor=one_array()),
        pb.Patch(index=0, at=0, tensor=Tensor(dtype=DTYPE_FLOAT32, library=1, shape=[2], data=bytes(8))),
        pb.Patch(index=0, at=0, list=pb.ListPatch(keep=0)),
        pb.Patch(index=1, list=pb.ListPatch(items=[Value(stacked=StackSlice(stack=0, first=1, count=2))])),
    ],
)
def test_malformed_patches(patch: pb.Patch) -> None:
    stack = Stack(dtype=DTYPE_FLOAT32, library=1, count=2, shape=[1, 2], data=bytes(16))
    objects = Objects(values=[Value(stack=stack), Value(list={})])
    with pytest.raises(EngineError, match="cannot be rebuilt"):
        Assembly({}, Resolver()).add(pb.Increment(objects=objects, patches=[patch]))
