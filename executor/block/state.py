"""What is known of one block: where its request is, what it waits for, what it was served, and how it ended.

It is data that two sides share, which take strict turns. The block's side (`executor.block.api`) writes what the block asks for;
the forward's side (`executor.block.mediator`) writes what the block is given, and where the model is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from executor.block.barrier import Barrier
from executor.block.cache import Recorder
from executor.block.stale_writes import Late
from executor.block.tally import Tally
from executor.core.ended import Ended
from executor.core.errors import Refusal
from executor.core.location import Kind, Location
from executor.model.apply import Call
from executor.model.meta_tensors import Fakes
from executor.model.skips import Skips
from executor.model.tree import ModuleTree
from executor.model.values import Served
from executor.saves.encoder import SaveRegistry
from interpose.v1 import trace_pb2 as pb


class BlockState:
    """The state of one block.

    Args:
        request_id: the engine's id of the request.
        trace_id: the trace.
        invoke: the invoke's index in the trace.
        namespace: the block's names; the block runs in it.
        tree: the model's modules.
        registry: the trace's saved values.
        emit: called with text that the block prints; returns whether it was sent.
        companions: how many invokes of the trace start together with it, itself included; 0: none does.
        whole: whether it has no prompt and sees the rows of its companions.
        fakes: makes its tensors, of a block that is scanned.

    Attributes:
        request_id, trace_id, invoke, namespace, registry, emit, companions, whole, fakes: as given.
        step: the step the request is in; -1 before the first.
        position: the model's place in that step (`ModuleTree.order_of`).
        served, served_at: what the block was served, and where, while it is there.
        waiting: what it waits for.
        call: the module that it wants applied, while it waits for that.
        barrier: where it waits for other invokes, while it does.
        skips: the modules that it skips.
        recorders: what it has recorded from step to step.
        late: what it was served and may change no longer.
        finished, result: whether the generation is over, and what it gave.
        result_asked: whether the block asked for the result, which lets the whole generation pass.
        used: seconds that it has taken in this step, with the modules that it applied.
        ended, failure: how it ended; None while it has not.
        logs: how often it printed.
        edit: the name of the standing edit that it is, "" for a request's own block.
        owner: the engine's id of the request that the edit runs in.
        rank: its place among the blocks of one request.
        tally: where it was served and where it wrote.
        wrote: digests of what it wrote in this step, where other ranks are to have written the same.
    """

    def __init__(
        self,
        *,
        request_id: str,
        trace_id: str,
        invoke: int,
        namespace: dict[str, Any],
        tree: ModuleTree,
        registry: SaveRegistry,
        emit: Callable[[str], bool],
        companions: int = 0,
        whole: bool = False,
        fakes: Fakes | None = None,
    ) -> None:
        self.request_id = request_id
        self.trace_id = trace_id
        self.invoke = invoke
        self.namespace = namespace
        self.registry = registry
        self.emit = emit
        self.companions = companions
        self.whole = whole
        self.fakes = fakes
        self.step = -1
        self.position = -1
        self.served: Served | None = None
        self.served_at: Location | None = None
        self.waiting: Location | None = None
        self.call: Call | None = None
        self.barrier: Barrier | None = None
        self.skips = Skips(tree)
        self.recorders: list[Recorder] = []
        self.late = Late()
        self.finished = False
        self.result: Any = None
        self.result_asked = False
        self.used = 0.0
        self.ended: Ended | None = None
        self.failure: pb.Failure | None = None
        self.logs = 0
        self.edit = ""
        self.owner = ""
        self.rank = 0
        self.tally = Tally()
        self.wrote: list[torch.Tensor] = []

    @property
    def live(self) -> bool:
        """Whether the block still waits for something."""
        return self.ended is None

    @property
    def resting(self) -> bool:
        """Whether the block has ended or waits for the result: it asks for nothing in a coming step."""
        return not self.live or (self.waiting is not None and self.waiting.kind == Kind.RESULT)

    @property
    def changed(self) -> bool:
        """Whether the block changed anything in the model's pass, so that computing the request anew would be wrong."""
        return bool(self.tally.writes or self.skips.fingerprint())

    @property
    def steps(self) -> int:
        """Steps begun."""
        return self.step + 1

    def never(self, location: Location) -> Refusal:
        """Why a location is not served: the generation is over."""
        message = f"{location} was never reached: the generation ended after {self.steps} step{'s' if self.steps != 1 else ''}"
        if self.result_asked:
            message += ". tracer.result waits for the end of the generation, and the block read it first; read it last"
        return Refusal(pb.ERROR_CODE_UNKNOWN_LOCATION, message, location=str(location))
