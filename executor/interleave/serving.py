"""What a block gets at a location, and what the model goes on with afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from executor.block.mediator import Mediator
from executor.core.errors import Refusal
from executor.core.location import COMPUTED, Kind, Location
from executor.core.request import Span
from executor.interleave.context import Host
from executor.interleave.machine.events import Failure
from executor.model import batched
from executor.model.batched import BatchValue, Member
from executor.model.bits import digest
from executor.model.meta_tensors import is_fake
from executor.model.node import Node
from executor.model.plain import check_plain
from executor.model.read_only import ReadOnly
from executor.model.rows import BatchRows, ManyRows, Rows
from executor.model.shapes import Shapes
from executor.model.tree import SAMPLES
from executor.model.values import Fixed, Served
from interpose.v1 import trace_pb2 as pb

_EXPERTS = "computed for one prompt; read it in the blocks of the prompts"
_JOINT = {
    Kind.PATTERN: "one prompt's: tokens of one never attend to another's; read it in the blocks of the prompts",
    Kind.EXPERT_ACT: _EXPERTS,
    Kind.EXPERT_OUT: _EXPERTS,
}
_SCANNED = {
    Kind.PATTERN: "computed from a prompt's own keys, which a scan has not; its shape is [heads, tokens, keys]",
    Kind.EXPERT_ACT: "computed from a prompt's own experts, which a scan has not; its shape is [tokens, chosen, width]",
    Kind.EXPERT_OUT: "computed from a prompt's own experts, which a scan has not; its shape is [tokens, chosen, hidden]",
}


@dataclass(slots=True)
class Visit:
    """A location of the model that it has come to.

    Attributes:
        node: the module.
        kind: which of its locations.
        position: the position of the location in the step (`ModuleTree.order_of`).
        value: what the model goes on with; of another pipeline stage's location, None.
        rows_of: gives a request's rows of the value.
    """

    node: Node
    kind: str
    position: int
    value: Any
    rows_of: Callable[[Span], Rows]


# Called with a block's key, the location, its name, the block's rows, and the index of its request in the batch.
WideOf = Callable[[str, Visit, str, Rows, int], Served | None]


class Serving:
    """Makes the values that blocks are served, and takes their changes back.

    Args:
        host: the worker.
        wide: returns all rows of a prompt that comes in chunks, to a block in the step of its last chunk; None: the block is
            served its rows of the step.
        closed: returns whether one of some blocks gets none of the rows of the step.
    """

    def __init__(self, host: Host, wide: WideOf, closed: Callable[[Iterable[str]], bool]) -> None:
        self._wide = wide
        self._closed = closed
        self._stages = host.stages
        self._several = host.ranks.several
        self._vocabulary = host.vocabulary
        self._cache = host.cache

    def give(self, mediator: Mediator, visit: Visit, location: str, rows: Rows | ManyRows, index: int) -> Served:
        """Return what a block is given, from the stage that has the location.

        Args:
            mediator: the block.
            visit: the location.
            location: what errors call it.
            rows: the block's rows.
            index: the index of its (first) request in the batch.

        Raises:
            Exception: it cannot be given; the same on every rank.
        """
        return self._stages.serve(location, lambda: self._made(mediator, visit, location, rows, index))

    def _made(self, mediator: Mediator, visit: Visit, location: str, rows: Rows | ManyRows, index: int) -> Served:
        node, kind, value = visit.node, visit.kind, visit.value
        if isinstance(rows, Rows):
            wide = self._wide(mediator.identity.request_id, visit, location, rows, index)
            if wide is not None:
                return wide
        if kind in COMPUTED:
            if isinstance(rows, ManyRows) or mediator.state.fakes is not None:
                why = (_JOINT if isinstance(rows, ManyRows) else _SCANNED)[Kind(kind)]
                raise Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, f"{location} is {why}", location=location)
            given, returned = value
            return Fixed(location, node.computed[kind].compute(given, returned, rows, index))
        if mediator.state.fakes is not None:
            return Shapes(location, value, rows, lambda path: node.layouts.of(kind, path), mediator.state.fakes.like)
        why = self._cache.why_not_looked_at if node.module is not None else ""
        if why:
            return ReadOnly(location, value, rows, lambda path: node.layouts.of(kind, path), why)
        return Served(location, value, rows, lambda path: node.layouts.of(kind, path))

    def shared(self, visit: Visit, rows: BatchRows, keys: Iterable[str]) -> BatchValue | None:
        """Return a location's value for several requests at once.

        If each block is to be served by itself, the call returns None.

        Args:
            visit: the location.
            rows: the rows of the requests.
            keys: the blocks.
        """
        node, kind = visit.node, visit.kind
        if node.module is not None and self._closed(keys):  # which of them is told by itself
            return None
        if self._stages.last or kind in COMPUTED or (node.module is not None and self._cache.why_not_looked_at):
            return None
        try:
            return BatchValue(visit.value, rows, lambda path: node.layouts.of(kind, path))
        except Exception:  # the same on every rank; each block is told by itself
            return None

    def settle_all(self, turned: Sequence[tuple[Mediator, Member, Location]], visit: Visit) -> list[Failure | None]:
        """Write what blocks with nothing in common changed at a location.

        Args:
            turned: the blocks that had a turn, with what they were served, and where.
            visit: the location.

        Returns:
            For each block why its change does not fit, if so.
        """
        gone = [
            (mediator, member, at)
            for mediator, member, at in turned
            if member.plain
            and mediator.state.waits.call is None
            and mediator.state.ending.failure is None
            and visit.node.path != SAMPLES
        ]
        try:
            batched.settle([member for _, member, _ in gone], visit.value)
        except Exception:  # each block is told by itself
            gone = []
        for mediator, member, at in gone:
            mediator.left()
            self._note(mediator, member, at)
        return [
            None if mediator.state.progress.served is None else self.settle(mediator, visit)
            for mediator, _, _ in turned
        ]

    def settle(self, mediator: Mediator, visit: Visit, leaving: bool = False) -> Failure | None:
        """Write what a block changed at a location into the value that the model goes on with.

        A block that applies a module, or waits at a barrier, has not moved on, unless the model is `leaving` the location.

        Returns:
            Why the change does not fit, if so; the model then goes on without the change.
        """
        served, at = mediator.state.progress.served, mediator.state.progress.served_at
        if (
            served is None
            or mediator.state.waits.call is not None
            or (mediator.state.waits.barrier is not None and not leaving)
        ):
            return None
        misfit = None
        mediator.bring_changes()
        try:
            if mediator.state.ending.failure is None:
                if mediator.state.fakes is None:
                    check_plain(served.value, str(at))
                if at is not None and at.path == SAMPLES:
                    self._check_tokens(served.value, str(at))
                visit.value = served.settle(visit.value)
        except Refusal as error:
            misfit = Failure(error.code, error.message, error.location or str(at))
        except Exception as error:
            message = f"what was assigned at {at} does not fit: {error}"
            misfit = Failure(pb.ERROR_CODE_INVALID_ARGUMENT, message, str(at))
        finally:
            mediator.left()
        if at is not None:
            self._note(mediator, served, at)
        return misfit

    def _note(self, mediator: Mediator, served: Served, at: Location) -> None:
        """Note what a block wrote at a location, for its account and for the other ranks."""
        record = mediator.state.record
        if self._several:
            for put, differs in served.put:
                record.wrote.append(digest(put) if differs is None else digest(put) * differs)
        if served.written:
            record.tally.write(f"{at.path}.{at.kind}")
        elif served.differs:
            record.tally.may_write(f"{at.path}.{at.kind}", served.differs)

    def _check_tokens(self, tokens: Any, location: str) -> None:
        """Refuse tokens that the model does not know, which would end the engine."""
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
