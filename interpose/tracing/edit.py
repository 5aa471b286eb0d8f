"""Standing edits: blocks that stay on the server and run in the requests that name them.

`with model.edit("calm") as edit:` captures the block and sends it to the server. The edit belongs to the tenant. With
`model.trace(prompt, edits=["calm"])` the edit runs before the trace's own block at each location. Each request has its own
copy of the edit's variables. An edit stays until the tenant clears it or the service ends.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from interpose import capture
from interpose.contract.errors import InvalidArgument
from interpose.contract.idioms import OF_EDITS
from interpose.contract.shown import OF_BLOCKS, shown
from interpose.contract.version import PROTOCOL
from interpose.program.builder import TraceBuilder
from interpose.program.check import frame_at
from interpose.rpc.threads import in_thread
from interpose.tracing.captured import CapturedBlock
from interpose.tracing.connection import EditedModel
from interpose.tracing.in_block import InEdit
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

# An edit outlives its session, and uploads belong to a session. So the edit's tensors travel inside the message.
_ALL_INLINE = (1 << 32) - 1


EDIT = 'write `with model.edit("name"):` and a block'


class StandingEdit:
    """An edit that the server keeps; `model.edits()` lists them.

    Attributes:
        name: the name that traces use.
        nbytes: the size that counts towards the tenant's limit for edits, in bytes.
        age_seconds: seconds from storing the edit to listing it.
        source: the source of the block.
    """

    def __init__(self, model: EditedModel, stored: StoredEdit) -> None:
        self._model = model
        self.name: str = stored.name
        self.nbytes: int = stored.bytes
        self.age_seconds: float = stored.age_seconds
        self.source: str = stored.source

    def clear(self) -> bool:
        """Drop the edit from the server; return whether the server had it.

        Requests that are running keep the edit.
        """
        return clear(self._model, self.name) > 0

    def __repr__(self) -> str:
        return f"<edit {self.name!r} of {self._model.name}, {self.nbytes} bytes>"


E = TypeVar("E", bound=StandingEdit)


class EditBlock(InEdit, CapturedBlock):
    """The block of an edit; made by `model.edit`.

    Inside the block, the object is the tracer: `for step in edit.iter[:]`.

    Args:
        model: the served model.
        name: the name that traces will use. The edit replaces an edit of the same name.
    """

    def __init__(self, model: EditedModel, name: str) -> None:
        self._model = model
        self.name = name

    def run_block(self, block: capture.Block, scope: capture.Scope) -> None:
        """Send the captured block to the server, which keeps it."""
        self._model.call("StoreEdit", self._request(block, scope))

    async def run_block_async(self, block: capture.Block, scope: capture.Scope) -> None:
        """Do the same as `run_block`, on an event loop."""
        await in_thread(self._model.call, "StoreEdit", self._request(block, scope))

    def clear(self) -> bool:
        """Drop the edit from the server; return whether the server had it.

        Requests that are running keep the edit.
        """
        return clear(self._model, self.name) > 0

    def _request(self, block: capture.Block, scope: capture.Scope) -> StoreEditRequest:
        _refuse_saves(block)
        limits = Limits()
        limits.CopyFrom(self._model.limits)
        limits.inline_bytes = _ALL_INLINE
        builder = TraceBuilder(
            self._model.name, self._model.tree, limits, lambda obj: obj is self, libraries=self._model.libraries
        )
        builder.add_invoke(block, scope, Prompt(), {})
        trace = builder.build()
        edit = Edit(name=self.name, scope=trace.scope, program=trace.invokes[0].program)
        return StoreEditRequest(protocol=PROTOCOL, model=self._model.name, edit=edit)

    def log(self, *values: object) -> None:
        """Print the values while a trace runs the edit; inside the block only."""
        self._outside("log")

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> NoReturn:
            if name == "result":
                self._outside(name)
            raise AttributeError(f"an edit has no attribute {name!r}", name=name, obj=self)

    def _outside(self, name: str) -> NoReturn:
        raise InvalidArgument(f"{name} of an edit belongs inside its block, which runs in the model")

    def __dir__(self) -> list[str]:
        return shown(self, OF_BLOCKS)


def _refuse_saves(block: capture.Block) -> None:
    for node in (node for statement in block.body for node in ast.walk(statement)):
        if isinstance(node, ast.Call) and "save" in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
            raise InvalidArgument(
                "an edit saves nothing, it runs inside other requests; save in the block of a trace that names it",
                frames=[frame_at(node, block.filename)],
            )


def check_name(name: object, options: Mapping[str, object]) -> str:
    """Return the name of a new edit; raise InvalidArgument for other objects and for options."""
    for option in options:
        hint = f": {OF_EDITS[option]}" if option in OF_EDITS else ""
        raise InvalidArgument(f"model.edit(name) takes no {option!r}{hint}")
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f'an edit has a name: model.edit("calm"), not {name!r}')
    return name


def check_names(edits: object) -> tuple[str, ...]:
    """Return the `edits` of a trace as names; raise InvalidArgument for other objects."""
    names: Any = [edits] if isinstance(edits, str) else edits
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument(f'edits are named: model.trace(…, edits=["calm"]), not {edits!r}')
    if len(set(names)) < len(names):
        raise InvalidArgument(f"an edit runs once in a request; {', '.join(names)} names one twice")
    return tuple(names)


def listed(model: EditedModel, kind: type[E]) -> list[E]:
    """Return the tenant's edits of a model, oldest first, as objects of the class `kind`."""
    reply: ListEditsReply = model.call("ListEdits", ListEditsRequest(model=model.name))
    return [kind(model, stored) for stored in reply.edits]


def clear(model: EditedModel, name: str) -> int:
    """Drop an edit, or with the name "" all edits of the model; return their number."""
    reply: ClearEditsReply = model.call("ClearEdits", ClearEditsRequest(model=model.name, name=name))
    return reply.cleared
