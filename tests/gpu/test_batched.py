"""One location for several requests on a GPU: changes are found on the device, without a wait."""

from __future__ import annotations

import pytest
import torch

from executor.block.tally import Tally, resolve
from executor.model.batched import Member
from tests.unit.executor.model.shared_locations import SPANS, WIDTH, leave, pair, served


def changed(members: list[Member]) -> list[bool]:
    """Return which members' changes an account has in the end."""
    tallies = [Tally() for _ in members]
    for member, tally in zip(members, tallies, strict=True):
        if member.written:
            tally.write("layer.output")
        elif member.differs:
            tally.may_write("layer.output", member.differs)
    resolve(tallies)
    return [bool(tally.writes) for tally in tallies]


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_each_block_gets_its_rows_and_its_change_alone_is_written(spans: list[tuple[int, int]]) -> None:
    hidden, residual = pair(device="cuda")
    before = hidden.clone(), residual.clone()
    members = served((hidden, residual), spans)
    for member, (start, stop) in zip(members, spans, strict=True):
        assert torch.equal(member.value[0], before[0][start:stop])
        assert torch.equal(member.value[1], before[1][start:stop])
        assert member.value[0].untyped_storage().nbytes() < 512 + (stop - start) * WIDTH * 4
    members[1].value[0][:] += 1000
    members[2].value[1].data.fill_(7)
    leave(members, (hidden, residual))
    assert changed(members) == [False, True, True]
    (start, stop), (first, last) = spans[1], spans[2]
    before[0][start:stop] += 1000
    before[1][first:last] = 7
    assert torch.equal(hidden, before[0])
    assert torch.equal(residual, before[1])


def test_copies_are_looked_at_without_a_wait() -> None:
    hidden, residual = pair(device="cuda")
    members = served((hidden, residual), SPANS["side by side"])
    for member in members:
        assert member.value[0].is_cuda
    members[1].value[0].data.fill_(3)
    members[2].value[0][:] = 4
    torch.cuda.set_sync_debug_mode("error")
    try:
        leave(members, (hidden, residual))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert changed(members) == [False, True, True]
    assert not any(member.written for member in members[:2])


def test_a_copy_is_made_on_the_model_s_device_whatever_the_block_s_modes() -> None:
    hidden, residual = pair(4, device="cuda")
    members = served((hidden, residual), [(0, 1), (1, 2)])
    with torch.device("cpu"), torch.inference_mode():
        first = members[0].value[0]
    assert first.is_cuda
    assert not first.is_inference()
