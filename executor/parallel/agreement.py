"""Agreement of the ranks on how each block's turn ended, and on what the block wrote.

Every rank runs the same blocks on the same values. After each turn, at a point that all ranks pass, the ranks exchange one
number for each block. Where the numbers differ, the block went different ways. The block then fails on all ranks, before any
rank waits in a collective operation that the other ranks never enter.

At the end of a step the ranks compare digests of the values that the blocks wrote into the model. Ranks that go on with
different values would compute what no model computes.

A digest covers every bit. What ranks share is the same in every bit: sums over the ranks are made in one order for all ranks,
and the same kernels run on the same numbers.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group, get_world_group


class Ranks(Protocol):
    """The ranks that run the same blocks.

    Attributes:
        several: whether there is more than one rank.
    """

    several: bool

    def compare(self, mine: list[int]) -> list[list[int]]:
        """Exchange one list of numbers; return the list of every rank in rank order.

        The returned lists include this rank's own.
        """

    def share(self, mine: Any) -> Any:
        """Return what the rank that reports has; what the other ranks give is not looked at."""


class Alone:
    """A rank without others."""

    several = False

    def compare(self, mine: list[int]) -> list[list[int]]:
        return [mine]

    def share(self, mine: Any) -> Any:
        return mine


class AllRanks:
    """The tensor-parallel ranks of all pipeline stages; they compare over a CPU group."""

    several = True

    def compare(self, mine: list[int]) -> list[list[int]]:
        group = get_world_group()
        numbers = torch.tensor(mine, dtype=torch.int64)
        everyone = [torch.empty_like(numbers) for _ in range(group.world_size)]
        dist.all_gather(everyone, numbers, group=group.cpu_group)
        return [numbers.tolist() for numbers in everyone]

    def share(self, mine: Any) -> Any:
        group = get_world_group()
        told = [mine]
        # The first rank of the last stage reports.
        dist.broadcast_object_list(told, group.ranks[-get_tp_group().world_size], group.cpu_group)
        return told[0]
