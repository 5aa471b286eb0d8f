"""Agreement of the ranks on how each block's turn ended, and on what it wrote.

Every rank runs the same blocks on the same values. After each turn, at a point that all of them pass, they exchange one
number for each block; where the numbers differ the block went different ways, and it fails on all ranks before any of them
waits in a collective operation that the others never enter. At the end of a step they compare digests of what the blocks wrote
into the model: ranks that go on with different values compute what no model computes.

Digests are of bits. What ranks share is the same in every bit: sums over the ranks are made in one order for all of them, and
the same kernels run on the same numbers.
"""

from __future__ import annotations

import zlib
from typing import Protocol

import torch
import torch.distributed as dist
from vllm.distributed import get_world_group

from executor.core.location import Location, State
from executor.model.apply import Call
from executor.model.skips import Skips
from executor.model.values import digest
from interpose.v1 import trace_pb2 as pb


class Ranks(Protocol):
    """The ranks that run the same blocks.

    Attributes:
        several: whether there are others.
    """

    several: bool

    def compare(self, mine: list[int]) -> list[list[int]]:
        """Exchange one list of numbers; return every rank's, this one's included, in rank order."""


class Alone:
    """One rank."""

    several = False

    def compare(self, mine: list[int]) -> list[list[int]]:
        return [mine]


class AllRanks:
    """The tensor-parallel ranks of all pipeline stages, compared over a CPU group."""

    several = True

    def compare(self, mine: list[int]) -> list[list[int]]:
        group = get_world_group()
        numbers = torch.tensor(mine, dtype=torch.int64)
        everyone = [torch.empty_like(numbers) for _ in range(group.world_size)]
        dist.all_gather(everyone, numbers, group=group.cpu_group)
        return [numbers.tolist() for numbers in everyone]


class Turned(Protocol):
    """A block that had a turn.

    Attributes:
        state, failure: how it ended, if it did.
        waiting, call: what it waits for, if it does.
        skips: the modules that it skips.
        step: the step that its request is in.
    """

    @property
    def state(self) -> State: ...
    @property
    def failure(self) -> pb.Failure | None: ...
    @property
    def waiting(self) -> Location | None: ...
    @property
    def call(self) -> Call | None: ...
    @property
    def skips(self) -> Skips: ...
    @property
    def step(self) -> int: ...


def fingerprint(mediator: Turned, several: bool) -> int:
    """A number that is the same on two ranks only if the block's turn ended the same way, with the same values to apply a module
    to. There being no other rank, values are left out: they would have to be waited for."""
    waiting = mediator.waiting
    failed = mediator.failure.exception_type if mediator.failure is not None else ""
    call = ""
    if mediator.call is not None:
        given = [int(digest(value)) for value in mediator.call.tensors] if several else []
        call = f"{mediator.call.fingerprint()}{given}"
    kind, skips = (waiting.kind if waiting else ""), mediator.skips.fingerprint()
    return zlib.crc32(f"{mediator.state.name}|{waiting}|{kind}|{call}|{skips}|{failed}".encode())


def divergence(mediator: Turned, votes: list[int]) -> pb.Failure:
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


def different_values(mediator: Turned, ranks: int) -> pb.Failure:
    return pb.Failure(
        code=pb.ERROR_CODE_INTERVENTION,
        exception_type="Divergence",
        exception_message="the block wrote different values on the ranks of the model",
        message=(
            f"the block wrote different values on the model's {ranks} ranks in step {mediator.step}; what it writes must not "
            "depend on the clock, on the order of sets, on generators of random numbers that it makes itself without a seed "
            "(torch.randn and numpy.random are the same on all ranks), or on operations whose results differ from run to run"
        ),
    )
