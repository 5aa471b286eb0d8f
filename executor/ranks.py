"""Agreement of the ranks on how each block's turn ended.

Every rank runs the same blocks on the same values. After each turn, at a point that all of them pass, they exchange one
number for each block; where the numbers differ the block went different ways, and it fails on all ranks before any of them
waits in a collective operation that the others never enter.
"""

from __future__ import annotations

import zlib
from typing import Protocol

import torch
import torch.distributed as dist
from vllm.distributed import get_world_group

from executor.mediator import Mediator
from interpose.v1 import trace_pb2 as pb


class Ranks(Protocol):
    """The ranks that run the same blocks."""

    def compare(self, mine: list[int]) -> list[list[int]]:
        """Exchange one list of numbers; return every rank's, this one's included, in rank order."""


class Alone:
    """One rank."""

    def compare(self, mine: list[int]) -> list[list[int]]:
        return [mine]


class AllRanks:
    """The tensor-parallel ranks of all pipeline stages, compared over a CPU group."""

    def compare(self, mine: list[int]) -> list[list[int]]:
        group = get_world_group()
        numbers = torch.tensor(mine, dtype=torch.int64)
        everyone = [torch.empty_like(numbers) for _ in range(group.world_size)]
        dist.all_gather(everyone, numbers, group=group.cpu_group)
        return [numbers.tolist() for numbers in everyone]


def fingerprint(mediator: Mediator) -> int:
    """A number that is the same on two ranks only if the block's turn ended the same way."""
    waiting = mediator.waiting
    failed = mediator.failure.exception_type if mediator.failure is not None else ""
    call = mediator.call.fingerprint() if mediator.call is not None else ""
    kind, skips = (waiting.kind if waiting else ""), mediator.skips.fingerprint()
    return zlib.crc32(f"{mediator.state.name}|{waiting}|{kind}|{call}|{skips}|{failed}".encode())


def divergence(mediator: Mediator, votes: list[int]) -> pb.Failure:
    return pb.Failure(
        code=pb.ERROR_CODE_INTERVENTION,
        exception_type="Divergence",
        exception_message="the block went different ways on the ranks of the model",
        message=(
            f"the block went different ways on the model's {len(votes)} ranks (on one it failed, ran out of time, or "
            f"asked for another location than {mediator.waiting or mediator.call or 'its end'}); it must not depend on the "
            "clock, on the order of sets, or on anything else that differs between processes"
        ),
    )
