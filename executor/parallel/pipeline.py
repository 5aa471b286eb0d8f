"""Pipeline stages in lockstep: a step with a live block is one step of all stages.

Every rank of every stage runs the same blocks. The stages go through a traced step one after the other. While one stage
computes its part, the other stages follow. The computing stage announces each location that a block waits for, and hands over
what it serves there. All ranks then have the same turns and compare how the turns ended.

So a value of the first stage is there when the block comes to the last stage. What the block then does is known to its copy on
the first stage before the next step. The stage that has a location writes the changes of its value. A stage that follows does
no other work meanwhile, so one traced step is in the pipeline at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from vllm.distributed import get_pp_group

from executor.core.request import Batch
from executor.model.node import Node
from executor.model.tree import ModuleTree
from executor.model.values import Served
from executor.parallel.transfer import Message, pack, pack_error, pack_served, unpack, unpack_error, unpack_served

T = TypeVar("T")


class Stages(Protocol):
    """The pipeline stages of a model.

    Attributes:
        mine: the index of this rank's stage.
        last: the index of the last stage.
    """

    mine: int
    last: int

    def begin(self, batch: Batch) -> None:
        """Tell the other stages of a step that begins on the first stage."""

    def begun(self) -> Batch:
        """Return the step that begins on the first stage."""

    def announce(self, path: str, kind: str) -> None:
        """Tell the other stages that the model is at a location of this stage.

        A stage that follows announces nothing.
        """

    def announced(self, stage: int) -> tuple[str, str] | None:
        """Return the next location that a block waits for in another stage's part.

        At the end of that part, the call returns None.
        """

    def serve(self, location: str, make: Callable[[], Served]) -> Served:
        """Return the served value of a location, made by the stage that has the location.

        Raises:
            Exception: the error that `make` raised on that stage; every stage raises it.
        """

    def apply(self, node: Node, run: Callable[[], Any]) -> Any:
        """Return the output of a module that a block applies.

        The stage that has the module runs it.
        Raises:
            Exception: the error that `run` raised on that stage; every stage raises it.
        """

    def end(self) -> None:
        """Tell the other stages that this stage's part of the step is over."""

    def fail(self, error: BaseException) -> None:
        """Tell the other stages that this stage cannot go on with its part of the step."""


class OneStage:
    """A model without pipeline parallelism."""

    mine = last = 0

    def begin(self, batch: Batch) -> None:
        pass

    def begun(self) -> Batch:
        raise AssertionError("there is no other stage to begin a step")

    def announce(self, path: str, kind: str) -> None:
        pass

    def announced(self, stage: int) -> None:
        pass

    def serve(self, location: str, make: Callable[[], Served]) -> Served:
        return make()

    def apply(self, node: Node, run: Callable[[], Any]) -> Any:
        return run()

    def end(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass


class StageFailed(RuntimeError):
    """Another stage could not go on with a step; the engine ends."""


class Pipeline:
    """The stages of a pipeline.

    A rank talks to the ranks that hold the same part of the other stages.

    Args:
        tree: the model's modules, joined over the stages.
    """

    def __init__(self, tree: ModuleTree) -> None:
        group = get_pp_group()
        self._group = group
        self._tree = tree
        self.mine: int = group.rank_in_group
        self.last: int = group.world_size - 1
        self._now = 0  # the stage whose part of the step is computed now

    def begin(self, batch: Batch) -> None:
        self._now = self.mine
        self._send({"batch": batch})

    def begun(self) -> Batch:
        self._now = 0
        batch: Batch = self._receive(0)["batch"]
        return batch

    def announce(self, path: str, kind: str) -> None:
        if self._now == self.mine:
            self._send({"at": (path, kind)})

    def announced(self, stage: int) -> tuple[str, str] | None:
        self._now = stage
        at: tuple[str, str] | None = self._receive(stage)["at"]
        if at is None:
            self._now = stage + 1
        return at

    def serve(self, location: str, make: Callable[[], Served]) -> Served:
        return self._from(self._now, make, pack_served, lambda message: unpack_served(message, location))

    def apply(self, node: Node, run: Callable[[], Any]) -> Any:
        return self._from(self._tree.stage_of(node), run, pack, unpack)

    def _from(
        self, stage: int, make: Callable[[], T], packed: Callable[[T], Message], unpacked: Callable[[Message], T]
    ) -> T:
        """Return what one stage makes; all stages take part in the call."""
        if stage != self.mine:
            message = self._receive(stage)
            error = unpack_error(message)
            if error is not None:
                raise error
            return unpacked(message)
        try:
            made = make()
        except Exception as error:
            message = pack_error(error)
            self._send(message)
            raise (unpack_error(message) or error) from None
        self._send(packed(made))
        return made

    def end(self) -> None:
        self._send({"at": None})
        self._now = self.mine + 1

    def fail(self, error: BaseException) -> None:
        if self._now == self.mine:
            self._send({"failed": f"pipeline stage {self.mine}: {type(error).__name__}: {error}"})

    def _send(self, message: Message) -> None:
        self._group.broadcast_tensor_dict(message, src=self.mine)

    def _receive(self, stage: int) -> Message:
        # The tensors are ordinary ones, even if the step is in inference mode: a block may change the output of a module it
        # applies.
        with torch.inference_mode(False), torch.no_grad():
            message: Message | None = self._group.broadcast_tensor_dict(src=stage)
        assert message is not None
        if "failed" in message:
            raise StageFailed(message["failed"])
        return message
