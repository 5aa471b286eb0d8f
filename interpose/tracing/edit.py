"""Standing edits: a block that stays on the server and runs inside every later request that names it.

`with model.edit("calm") as edit:` captures the block and leaves it with the server, where it is the tenant's own; with
`model.trace(prompt, edits=["calm"])` it runs before the trace's own block at each location. It is bound anew for each
request. Edits last until they are cleared or the service ends.
"""

from __future__ import annotations

import ast
from typing import Any, NoReturn, TypeVar

from interpose import capture
from interpose.contract.errors import InvalidArgument
from interpose.contract.version import PROTOCOL
from interpose.program.builder import TraceBuilder
from interpose.program.check import frame_at
from interpose.rpc.threads import in_thread
from interpose.tracing.captured import CapturedBlock
from interpose.tracing.connection import EditedModel
from interpose.v1.service_pb2 import (
    ClearEditsReply,
    ClearEditsRequest,
    Limits,
    ListEditsReply,
    ListEditsRequest,
    StoredEdit,
    StoreEditRequest,
)
from interpose.v1.trace_pb2 import Edit, Prompt

# An edit outlives the session that uploads belong to, so its tensors travel inside the message.
_ALL_INLINE = (1 << 32) - 1


EDIT = 'write `with model.edit("name"):` and a block'


class StandingEdit:
    """An edit that the server keeps; `model.edits()` lists them.

    Attributes:
        name: what traces name it by.
        nbytes: what it takes of the tenant's room for edits.
        age_seconds: since it was stored, when it was listed.
        source: its block.
    """

    def __init__(self, model: EditedModel, stored: StoredEdit) -> None:
        self._model = model
        self.name: str = stored.name
        self.nbytes: int = stored.bytes
        self.age_seconds: float = stored.age_seconds
        self.source: str = stored.source

    def clear(self) -> bool:
        """Drop it from the server; requests that run already keep it. Returns whether it was there."""
        return clear(self._model, self.name) > 0

    def __repr__(self) -> str:
        return f"<edit {self.name!r} of {self._model.name}, {self.nbytes} bytes>"


E = TypeVar("E", bound=StandingEdit)


class EditBlock(CapturedBlock):
    """The block of an edit; made by `model.edit`. Inside it, it is the tracer: `for step in edit.iter[:]`.

    Args:
        model: the served model.
        name: what traces will name it by; an edit of that name is replaced.
    """

    def __init__(self, model: EditedModel, name: str) -> None:
        self._model = model
        self.name = name

    def run_block(self, block: capture.Block, scope: capture.Scope) -> None:
        """Leave the captured block with the server."""
        self._model.call("StoreEdit", self._request(block, scope))

    async def run_block_async(self, block: capture.Block, scope: capture.Scope) -> None:
        """The same, on an event loop."""
        await in_thread(self._model.call, "StoreEdit", self._request(block, scope))

    def clear(self) -> bool:
        """Drop it from the server; requests that run already keep it. Returns whether it was there."""
        return clear(self._model, self.name) > 0

    def _request(self, block: capture.Block, scope: capture.Scope) -> StoreEditRequest:
        _refuse_saves(block)
        limits = Limits()
        limits.CopyFrom(self._model.limits)
        limits.inline_bytes = _ALL_INLINE
        builder = TraceBuilder(self._model.name, self._model.tree, limits, lambda obj: obj is self)
        builder.add_invoke(block, scope, Prompt(), {})
        trace = builder.build()
        edit = Edit(name=self.name, scope=trace.scope, program=trace.invokes[0].program)
        return StoreEditRequest(protocol=PROTOCOL, model=self._model.name, edit=edit)

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("iter", "all", "log", "result"):
            raise InvalidArgument(f"{name} of an edit belongs inside its block, which runs in the model")
        raise AttributeError(f"an edit has no attribute {name!r}")


def _refuse_saves(block: capture.Block) -> None:
    for node in (node for statement in block.body for node in ast.walk(statement)):
        if isinstance(node, ast.Call) and "save" in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
            raise InvalidArgument(
                "an edit saves nothing, it runs inside other requests; save in the block of a trace that names it",
                frames=[frame_at(node, block.filename)],
            )


def check_name(name: object) -> str:
    """Return the name of a new edit; InvalidArgument unless it is one."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f'an edit has a name: model.edit("calm"), not {name!r}')
    return name


def check_names(edits: object) -> tuple[str, ...]:
    """Return the `edits` argument of a trace; InvalidArgument unless it is names."""
    names: Any = [edits] if isinstance(edits, str) else edits
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument(f'edits are named: model.trace(…, edits=["calm"]), not {edits!r}')
    if len(set(names)) < len(names):
        raise InvalidArgument(f"an edit runs once in a request; {', '.join(names)} names one twice")
    return tuple(names)


def listed(model: EditedModel, kind: type[E]) -> list[E]:
    """Return the tenant's edits of a model, oldest first, as objects of a kind."""
    reply: ListEditsReply = model.call("ListEdits", ListEditsRequest(model=model.name))
    return [kind(model, stored) for stored in reply.edits]


def clear(model: EditedModel, name: str) -> int:
    """Drop one edit, or all of a model's for the name ""; return how many there were."""
    reply: ClearEditsReply = model.call("ClearEdits", ClearEditsRequest(model=model.name, name=name))
    return reply.cleared
