"""Pipeline stages in lockstep: a step with a live block is one step of all of them, each location on the stage that has it.

Every rank of every stage runs the same blocks. The stages go through a traced step one after the other. While one computes
its part, the others follow: it announces each location that somebody waits for, hands over what its blocks are served there,
and all ranks have the same turns and compare how they ended. So a value of the first stage is there when the block comes to
the last one, and what it then does there is known to its copy on the first before the next step. What is changed is written
by the stage that has it. A stage that follows takes nothing else on meanwhile, so one traced step is in the pipeline at a time.
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
        mine: this rank's stage.
        last: the last stage.
    """

    mine: int
    last: int

    def begin(self, batch: Batch) -> None:
        """Tell the others of a step that begins on the first stage."""

    def begun(self) -> Batch:
        """Return the step that begins on the first stage."""

    def announce(self, path: str, kind: str) -> None:
        """Tell the others that the model is at a location of this stage; nothing where this stage follows."""

    def announced(self, stage: int) -> tuple[str, str] | None:
        """Return the next location that somebody waits for in the part of a stage that this one follows; None at its end."""

    def serve(self, location: str, make: Callable[[], Served]) -> Served:
        """Return what a block is served, made by the stage that has the location.

        Raises:
            Exception: what `make` raised there; the same on every stage.
        """

    def apply(self, node: Node, run: Callable[[], Any]) -> Any:
        """Return what a module gives that is applied, on the stage that has it.

        Raises:
            Exception: what `run` raised there; the same on every stage.
        """

    def end(self) -> None:
        """Tell the others that this stage's part of the step is over."""

    def fail(self, error: BaseException) -> None:
        """Tell the others that this stage cannot go on with its part of the step."""


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
    """The stages of a pipeline; a rank talks to those that hold the same part of the other stages.

    Args:
        tree: the model's modules, joined over the stages.
    """

    def __init__(self, tree: ModuleTree) -> None:
        group = get_pp_group()
        self._group = group
        self._tree = tree
        self.mine: int = group.rank_in_group
        self.last: int = group.world_size - 1
        self._now = 0  # whose part of the step it is

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
        """Return what one stage makes; all of them are here."""
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
        # Ordinary tensors, whatever the engine's step is in: a block may change what it gets of a module that it applies.
        with torch.inference_mode(False), torch.no_grad():
            message: Message | None = self._group.broadcast_tensor_dict(src=stage)
        assert message is not None
        if "failed" in message:
            raise StageFailed(message["failed"])
        return message
