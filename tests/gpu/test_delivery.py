"""What loops read on a GPU arrives at the requests beside the next steps."""

from __future__ import annotations

import pytest
import torch

from executor.graphs.tickets import SideStream
from tests.unit.executor.graphs.test_later import Steps

GPU = torch.device("cuda")


@pytest.mark.parametrize("blocks", [2, 4])
def test_every_step_arrives_while_others_run(blocks: int) -> None:
    steps = Steps(SideStream(GPU), blocks, "cuda", a=5, b=4, c=3)
    for count in (1, 7, 200, 3):
        steps.run(count)
    steps.check("a")
    steps.leave("a")
    steps.run(100)
    steps.later.drop("b")
    steps.leave("b")
    steps.run(9)
    steps.check("c")
    assert steps.later.idle
    steps.later.close()


def test_page_locked_memory_is_made_once() -> None:
    steps = Steps(SideStream(GPU), 2, "cuda", a=12)
    steps.run(300)
    assert steps.made == 2 and all(block.memory.is_pinned() for block in steps.later._blocks)
    steps.check("a")
    steps.later.close()
