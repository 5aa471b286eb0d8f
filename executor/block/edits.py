"""Standing edits inside a worker: a tenant's blocks, bound anew for each request.

In a request an edit is a block of its own, with its own names and values. At every location edits are served first, in the
order in which the trace names them, so that the trace's block sees what they made of the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType
from typing import Any

from executor.block.binding import BindingFailed
from executor.block.budget import Budget
from executor.block.scope import TraceScope
from executor.block.uploads import Uploads
from executor.block.watchdog import padded
from executor.core.errors import Refusal
from executor.core.programs import Codes
from executor.core.request import Opened
from executor.model.tree import ModuleTree
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Blob
from interpose.wire.encoder import WireError


@dataclass(frozen=True)
class BoundEdit:
    """One edit, ready to run in one request.

    Attributes:
        key: stands for it where a request id stands for a request's own block.
        rank: its place in the request's turn order; a request's own block has 0, edits come before it.
    """

    key: str
    name: str
    rank: int
    scope: TraceScope
    code: CodeType
    namespace: dict[str, Any]


class Edits:
    """Binds the edits of new requests.

    Args:
        tree: the model's modules.
        budget: time and memory bounds, of the user's code that runs while an edit is bound.
    """

    def __init__(self, tree: ModuleTree, budget: Budget) -> None:
        self._tree = tree
        self._budget = budget

    def bind(self, request_id: str, opened: Opened, arrival: int) -> list[BoundEdit]:
        """Bind the edits of a trace for one of its requests.

        Raises:
            Refusal, WireError: one of them cannot be bound here; the message names it.
        """
        applied = opened.trace.applied
        if not applied:
            return []
        return [
            self._bind_one(f"{request_id}#{number}", edit, opened, arrival, number - len(applied))
            for number, edit in enumerate(applied)
        ]

    def _bind_one(self, key: str, edit: pb.Edit, opened: Opened, arrival: int, rank: int) -> BoundEdit:
        try:
            trace = pb.Trace(id=key, scope=edit.scope)
            scope = TraceScope(
                trace,
                1,
                opened.session,
                self._tree,
                Uploads(_no_blob),
                self._budget,
                Codes(opened.codes),
                arrival=arrival,
                blame=padded(opened.trace.id),
            )
            code, namespace = scope.program(edit.program, ())
        except BindingFailed as error:
            error.failure.message = f"the edit {edit.name!r} cannot run: {error.failure.message}"
            raise
        except Refusal as error:
            raise Refusal(error.code, f"the edit {edit.name!r} cannot run: {error.message}") from None
        except WireError as error:
            raise WireError(f"the edit {edit.name!r} cannot run: {error}") from None
        return BoundEdit(key, edit.name, rank, scope, code, namespace)


def _no_blob(blob: Blob) -> Any:
    raise WireError("an edit brings its tensors itself")
