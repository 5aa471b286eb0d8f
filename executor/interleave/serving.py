"""What a block gets where the model is, and what the model goes on with when the block has moved on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from executor.block.mediator import Mediator
from executor.core.errors import Refusal
from executor.core.location import Kind
from executor.core.text import clip
from executor.interleave.turns import Turns
from executor.model.items import made_here
from executor.model.kv_guard import CacheGuard
from executor.model.meta_tensors import is_fake
from executor.model.node import Node
from executor.model.read_only import ReadOnly
from executor.model.rows import ManyRows, Rows
from executor.model.tree import SAMPLES
from executor.model.values import Fixed, Served, Shapes, digest
from executor.parallel.agreement import Ranks
from executor.parallel.pipeline import Stages
from interpose.v1 import trace_pb2 as pb


@dataclass(frozen=True)
class Place:
    """A location of the model that it has come to.

    Attributes:
        node: the module.
        kind: which of its locations.
        position: its place in the step (`ModuleTree.order_of`).
    """

    node: Node
    kind: str
    position: int


class Serving:
    """Serves the blocks of one worker.

    Args:
        stages: the pipeline's stages.
        ranks: those that run the same blocks.
        turns: lets blocks run.
        fail: called with a block that has ended and whose change does not fit, and why it fails.
        vocabulary: how many tokens the model knows.
        cache: looks after what blocks leave in the engine's cache.
    """

    def __init__(
        self,
        stages: Stages,
        ranks: Ranks,
        turns: Turns,
        fail: Callable[[Mediator, pb.Failure], None],
        vocabulary: int,
        cache: CacheGuard,
    ) -> None:
        self._stages = stages
        self._ranks = ranks
        self._turns = turns
        self._fail = fail
        self._vocabulary = vocabulary
        self._cache = cache

    def serve(self, mediator: Mediator, place: Place, value: Any, rows: Rows | ManyRows, index: int) -> None:
        """Let a block have its rows of a location until it asks for something else.

        Args:
            value: the model's there; of another stage's, None.
            rows: the block's.
            index: its request's place in the batch.
        """
        at = mediator.state.waits.location
        if at is None:
            return
        try:
            served = self.give(mediator, place, str(at), value, rows, index)
        except Exception as error:
            refusal = error
            if not isinstance(error, Refusal):
                refusal = Refusal(
                    pb.ERROR_CODE_ENGINE, f"the value at {at} could not be given: {error}", location=str(at)
                )
            self._turns.run(mediator, lambda: mediator.throw(refusal))
            return
        self._turns.run(mediator, lambda: mediator.serve(served, at, place.position))

    def give(
        self, mediator: Mediator, place: Place, location: str, value: Any, rows: Rows | ManyRows, index: int
    ) -> Served:
        """Return what a block is given, from the stage that has the location.

        Args:
            location: what errors call it.

        Raises:
            Exception: it cannot be given; the same on every rank.
        """
        return self._stages.serve(location, lambda: self._made(mediator, place, location, value, rows, index))

    def _made(
        self, mediator: Mediator, place: Place, location: str, value: Any, rows: Rows | ManyRows, index: int
    ) -> Served:
        node, kind = place.node, place.kind
        if kind == Kind.PATTERN:
            if isinstance(rows, ManyRows) or mediator.state.fakes is not None:
                why = "computed from a prompt's own keys, which a scan has not; its shape is [heads, tokens, keys]"
                if isinstance(rows, ManyRows):
                    why = "one prompt's: tokens of one never attend to another's; read it in the blocks of the prompts"
                raise Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, f"{location} is {why}", location=location)
            given, returned = value
            return Fixed(location, node.computed[kind].compute(given, returned, rows, index))
        if mediator.state.fakes is not None:
            return Shapes(location, value, rows, lambda path: node.layouts.of(kind, path), mediator.state.fakes.like)
        why = self._cache.why_not_looked_at if node.module is not None else ""
        if why:
            return ReadOnly(location, value, rows, lambda path: node.layouts.of(kind, path), why)
        return Served(location, value, rows, lambda path: node.layouts.of(kind, path))

    def settle(self, mediator: Mediator, value: Any, leaving: bool = False) -> Any:
        """Write back what a block changed at the location it has left; return the value that the model goes on with.

        A block that applies a module, or waits at a barrier, has not moved on; while the model is there it is `leaving` not.
        """
        served, at = mediator.state.progress.served, mediator.state.progress.served_at
        if (
            served is None
            or mediator.state.waits.call is not None
            or (mediator.state.waits.barrier is not None and not leaving)
        ):
            return value
        try:
            if mediator.state.ending.failure is None:
                if mediator.state.fakes is None:
                    check_plain(served.value, str(at))
                if at is not None and at.path == SAMPLES:
                    self._check_tokens(served.value, str(at))
                value = served.settle(value)
        except Exception as error:
            message = f"what was assigned at {at} does not fit: {error}"
            refused = Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=str(at))
            refused = error if isinstance(error, Refusal) else refused
            if mediator.state.live:
                self._turns.run(mediator, lambda: mediator.throw(refused))
            else:
                self._fail(mediator, pb.Failure(code=refused.code, message=clip(refused.message), location=str(at)))
        finally:
            mediator.left()
        if self._ranks.several:
            for put, differs in served.put:
                mediator.state.record.wrote.append(digest(put) if differs is None else digest(put) * differs)
        if at is not None:
            where = f"{at.path}.{at.kind}"
            if served.written:
                mediator.state.record.tally.write(where)
            elif served.differs:
                mediator.state.record.tally.may_write(where, served.differs)
        return value

    def _check_tokens(self, tokens: Any, location: str) -> None:
        """Refuse tokens that nobody could go on with: the next step would end the engine, and so would their text."""
        if not isinstance(tokens, torch.Tensor) or is_fake(tokens):
            return
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= self._vocabulary:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{location} was given the token {least if least < 0 else most}; the model has tokens from 0 to "
                f"{self._vocabulary - 1}",
                location=location,
            )


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_CONTAINERS = frozenset({tuple, list, dict})


def check_plain(value: Any, location: str) -> None:
    """Refuse what has code of its own among a location's values: it would run where the change is written back.

    Raises:
        Refusal: INVALID_ARGUMENT, with the type and what to write instead.
    """
    kind = type(value)
    if kind in _PLAIN or value is None:
        return
    if kind in _CONTAINERS or made_here(kind):
        for item in value.values() if kind is dict else value:
            check_plain(item, location)
    elif issubclass(kind, torch.Tensor | tuple | list | dict):
        plain = "tensor: value.as_subclass(torch.Tensor)" if issubclass(kind, torch.Tensor) else "tuple, list or dict"
        raise Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT,
            f"{location} was assigned a {kind.__name__}, whose own code the engine does not run; assign a plain {plain}",
            location=location,
        )
