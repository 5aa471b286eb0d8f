"""One location for several requests: what each block sees, what the model goes on with, and who holds which memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.core.errors import Refusal
from executor.model.batched import settle
from executor.model.items import Opaque
from tests.unit.executor.model.shared_locations import SPANS, WIDTH, leave, pair, served


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_each_block_gets_its_rows_and_its_change_alone_is_written(spans: list[tuple[int, int]]) -> None:
    hidden, residual = pair()
    before = hidden.clone(), residual.clone()
    members = served((hidden, residual), spans)
    for member, (start, stop) in zip(members, spans, strict=True):
        assert torch.equal(member.value[0], before[0][start:stop])
        assert torch.equal(member.value[1], before[1][start:stop])
    members[1].value[0][:] += 1000
    after = leave(members, (hidden, residual))
    assert after == (hidden, residual)
    assert [member.written for member in members] == [False, True, False]
    expected = before[0].clone()
    expected[spans[1][0] : spans[1][1]] += 1000
    assert torch.equal(hidden, expected)
    assert torch.equal(residual, before[1])


def test_a_change_that_torch_does_not_count_is_found() -> None:
    hidden, residual = pair()
    members = served((hidden, residual), SPANS["prompts"])
    for member in members:
        assert member.value[0].numel()
    members[2].value[0].numpy()[:] = 7
    members[0].value[1].data.fill_(5)
    leave(members, (hidden, residual))
    assert [member.written for member in members] == [True, False, True]
    assert torch.equal(hidden[5:6], torch.full((1, WIDTH), 7.0))
    assert torch.equal(residual[0:3], torch.full((3, WIDTH), 5.0))


def test_a_block_changes_a_second_assigns_a_third_reads_and_a_fourth_saves() -> None:
    hidden, residual = pair(4)
    before = hidden.clone()
    members = served((hidden, residual), [(0, 1), (1, 2), (2, 3), (3, 4)])
    members[0].value[0][:] *= 2
    members[1].value[0] = torch.full((1, WIDTH), 9.0)
    read = members[2].value[0].sum()
    kept = members[3].value[0]
    snapshot = kept.clone()
    after = leave(members, (hidden, residual))
    assert read == before[2].sum()
    assert torch.equal(kept, snapshot)
    assert after[1] is residual
    expected = before.clone()
    expected[0] *= 2
    assert torch.equal(hidden, expected)  # an assigned value takes the tensor's place and leaves the tensor as it is
    expected[1] = 9.0
    assert torch.equal(after[0], expected)
    assert [member.written for member in members] == [True, True, False, False]


def test_a_whole_value_that_is_assigned_takes_its_place() -> None:
    hidden = pair(3)[0]
    members = served(hidden, [(0, 1), (1, 2), (2, 3)])
    members[0].assign(torch.zeros(1, WIDTH))
    members[2].value[:] = 3
    after = leave(members, hidden)
    assert torch.equal(after[0], torch.zeros(WIDTH))
    assert torch.equal(after[2], torch.full((WIDTH,), 3.0))
    assert torch.equal(after[1], hidden[1])
    assert members[1].plain


def test_a_change_reaches_what_another_block_has_put_in_the_place() -> None:
    hidden, residual = pair(3)
    replaced = hidden.clone()
    members = served((hidden, residual), [(0, 1), (1, 2), (2, 3)])
    members[1].value[0].fill_(1)
    after = leave(members, (replaced, residual))
    assert after[0] is replaced
    assert torch.equal(replaced[1], torch.ones(WIDTH))
    assert torch.equal(hidden[1], torch.ones(WIDTH))


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_a_copy_that_is_kept_keeps_no_other_rows(spans: list[tuple[int, int]]) -> None:
    hidden, residual = pair()
    members = served((hidden, residual), spans)
    for member, (start, stop) in zip(members, spans, strict=True):
        kept = member.value[0]
        assert kept.untyped_storage().nbytes() == (stop - start) * WIDTH * 4
        assert not kept.is_inference()
    storages = {member.value[0].untyped_storage().data_ptr() for member in members}
    assert len(storages) == len(members)


def test_a_tensor_at_which_no_block_looks_is_not_copied() -> None:
    hidden, residual = pair(3)
    members = served((hidden, residual), [(0, 1), (1, 2), (2, 3)])
    assert members[0].value[0].numel()
    first, second = members[0]._batch.tensors
    assert first.copies is not None
    assert second.copies is None
    assert first.taken == [True, False, False]
    assert [len(member.given()) for member in members] == [1, 0, 0]


@pytest.mark.parametrize("nested", [False, True])
def test_a_tuple_that_a_block_keeps_has_the_values_of_its_location(nested: bool) -> None:
    hidden, residual = pair(2)
    before = residual.clone()
    value: Any = ((hidden, residual), {}) if nested else (hidden, residual)
    members = served(value, [(0, 1), (1, 2)])
    kept = members[0].value[0] if nested else members[0].value
    leave(members, value)
    with torch.inference_mode():
        residual.fill_(100)
    assert torch.equal(kept[1], before[0:1])


def test_the_copies_are_all_alike_and_their_versions_too() -> None:
    for spans in SPANS.values():
        members = served(pair(), spans)
        versions = {member.value[0]._version for member in members}
        assert versions == {members[0]._batch.tensors[0].version}


def test_one_tensor_at_two_places_is_one_copy() -> None:
    hidden = pair(2)[0]
    members = served((hidden, hidden), [(0, 1), (1, 2)])
    first, second = members[1].value
    assert first is second
    second.zero_()
    leave(members, (hidden, hidden))
    assert not hidden[1].any()
    assert hidden[0].any()


def test_a_change_of_a_shape_is_refused_before_anything_is_written() -> None:
    hidden, residual = pair(2)
    before = hidden.clone()
    members = served((hidden, residual), [(0, 1), (1, 2)])
    members[0].value[0].fill_(8)
    members[1].value[0].resize_(2, WIDTH)
    with torch.inference_mode(), pytest.raises(ValueError, match="shape"):
        settle(members, (hidden, residual))
    assert torch.equal(hidden, before)
    with torch.inference_mode():
        members[0].settle((hidden, residual))
        with pytest.raises(ValueError, match="its shape became"):
            members[1].settle((hidden, residual))
    assert torch.equal(hidden[0], torch.full((WIDTH,), 8.0))
    assert torch.equal(hidden[1], before[1])


def test_lists_dicts_and_tensors_without_rows() -> None:
    hidden, residual = pair(2)
    value = [hidden, {"residual": residual, "scale": 2.0}, torch.zeros(7), None]
    members = served(value, [(0, 1), (1, 2)])
    assert not members[0].plain
    seen = members[1].value
    assert isinstance(seen[2], Opaque)
    assert seen[1]["scale"] == 2.0
    seen[1]["residual"].fill_(4)
    seen[0] = torch.zeros(1, WIDTH)
    after = leave(members, value)
    assert torch.equal(after[0][1], torch.zeros(WIDTH))
    assert torch.equal(residual[1], torch.full((WIDTH,), 4.0))
    assert after[2] is value[2]


def test_a_name_that_is_put_into_an_empty_dict_is_seen() -> None:
    hidden = pair(2)[0]
    members = served(((hidden,), {}), [(0, 1), (1, 2)])
    assert members[0].plain
    members[0].value[1]["more"] = 1
    assert not members[0].plain
    assert members[1].plain


def test_an_assignment_after_the_block_has_gone_on_is_refused() -> None:
    hidden, residual = pair(2)
    members = served((hidden, residual), [(0, 1), (1, 2)])
    kept = members[0].value
    leave(members, (hidden, residual))
    with pytest.raises(Refusal, match="had gone on from there"):
        kept[0] = torch.zeros(1, WIDTH)


def test_a_copy_is_made_outside_of_the_modes_that_a_block_has_opened() -> None:
    hidden, residual = pair(2)
    members = served((hidden, residual), [(0, 1), (1, 2)])
    with torch.device("meta"), torch.enable_grad(), torch.inference_mode():
        first = members[0].value[0]
    assert first.device.type == "cpu"
    assert not first.is_inference()
    assert not first.requires_grad
    first.add_(1)
    leave(members, (hidden, residual))
    assert members[0].written
