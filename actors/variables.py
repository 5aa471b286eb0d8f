"""The variables that a session's traces share; the copies here are authoritative.

Traces that share a variable run one after another. When the trace's turn comes, it gets the copy from here. If the trace
ends well, its own version replaces the copy. So a later trace sees the changes of an earlier trace, even before the client
has heard of them. A trace that fails changes nothing. A large tensor in a variable does not pass through the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from actors.failures import not_found
from actors.saved import Saved, nested
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Objects, RemoteTensor, TensorView, Value
from interpose.wire import stacks

MAX_VARIABLES = 4096  # variables of one session


@dataclass(frozen=True)
class Left:
    """A variable as a trace leaves it.

    It has a new version and an index in the trace's table of saved objects.
    """

    variable: pb.SessionVariable
    index: int


@dataclass(frozen=True)
class Copy:
    """The authoritative copy of a variable.

    Attributes:
        objects: the table that holds the variable, with other objects that the same trace left.
        index: the variable's index in the table.
        blobs: the saved tensors that the table names, by blob id.
    """

    version: int
    objects: Objects
    index: int
    blobs: Mapping[str, Saved] = field(repr=False)


class SharedVariables:
    """The authoritative copies of variables, by the ids that the client chose."""

    def __init__(self) -> None:
        self._copies: dict[str, Copy] = {}

    @property
    def blobs(self) -> dict[str, Saved]:
        """The saved tensors in the copies, by blob id."""
        return {blob_id: saved for copy in self._copies.values() for blob_id, saved in copy.blobs.items()}

    @property
    def size(self) -> int:
        """Bytes of the copies' tables."""
        return sum({id(copy.objects): copy.objects.ByteSize() for copy in self._copies.values()}.values())

    def clear(self) -> None:
        """Forget all copies."""
        self._copies.clear()

    def lend(self, trace: pb.Trace) -> dict[str, Saved]:
        """Put the copies into a trace; return the saved tensors in them, by blob id.

        Raises:
            ServiceFailure: NOT_FOUND, a variable does not exist (any more); INVALID_ARGUMENT, the client has changed a version
                that is not the latest; QUOTA_EXCEEDED, there are too many variables.
        """
        new = {variable.id for variable in trace.variables} - self._copies.keys()
        if len(self._copies) + len(new) > MAX_VARIABLES:
            message = f"the traces of a session share up to {MAX_VARIABLES} objects: put some into one list or dict"
            raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message, trace_id=trace.id))
        lent: dict[str, Saved] = {}
        tables: dict[int, tuple[Objects, dict[int, int]]] = {}
        for variable in trace.variables:
            copy = self._copies.get(variable.id)
            if variable.canonical and copy is not None:
                lent.update(copy.blobs)
                tables.setdefault(id(copy.objects), (copy.objects, {}))[1][copy.index] = variable.entry
            elif variable.canonical:
                raise not_found(
                    "the session does not keep (any more) what its traces share: share it anew, in the outer block of a "
                    "trace: x = [].save()"
                )
            elif copy is not None and copy.version != variable.version:
                message = (
                    "an object that traces of the session share was changed in the notebook and by another trace: wait for "
                    "that one (tracer.job.wait()) before you change it"
                )
                raise ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, message, trace_id=trace.id))
        for objects, moved in tables.values():
            _splice(trace.scope, objects, moved)
        return lent

    def settle(self, trace: pb.Trace, saves: pb.Saves, own: int, failed: bool) -> list[Left]:
        """Prepare the shared objects of a trace for its client.

        The client gets the new versions, or nothing if the trace failed.

        Args:
            trace: the trace.
            saves: the trace's shared scope at its end; changed in place.
            own: number of entries of the trace's scope that are the client's.
            failed: whether any invoke of the trace failed.

        Returns:
            The argument of `copies`, once all values are here.
        """
        names = _names(trace)
        bound = {binding.name: binding.value for binding in saves.names}
        updates = {update.index: update.value for update in saves.updates}
        without_names: set[str] = set()
        without_updates = {index for index in updates if index >= own}
        left: list[Left] = []
        for variable in trace.variables:
            mine = names.get(variable.entry, [])
            if failed:
                without_names.update(mine)
                without_updates.add(variable.entry)
                continue
            # An object that was only changed in place keeps its identity in the notebook: the client needs its new contents only.
            contents = updates.get(variable.entry)
            if contents is not None:
                without_names.update(name for name in mine if _at(saves, bound.get(name)) == contents)
            value = bound.get(mine[0]) if mine else None
            if value is None or value.WhichOneof("kind") != "ref":
                continue  # the variable's first name holds another object now, such as a number
            known = self._copies.get(variable.id)
            version = max(variable.version, known.version if known is not None else 0) + 1
            renewed = pb.SessionVariable(id=variable.id, entry=variable.entry, version=version)
            left.append(Left(renewed, value.ref))
        kept = [binding for binding in saves.names if binding.name not in without_names]
        changed = [update for update in saves.updates if update.index not in without_updates]
        del saves.names[:], saves.updates[:]
        saves.names.extend(kept)
        saves.updates.extend(changed)
        saves.variables.extend(one.variable for one in left)
        said = [*(binding.value for binding in kept), *(update.value for update in changed)]
        if not left and not any(value.WhichOneof("kind") == "ref" for value in nested(said)):
            del saves.objects.values[:]  # no name leads to these objects any more, and their tensors need not be kept
        return left

    def keep(self, copies: Mapping[str, Copy]) -> None:
        """Replace copies by what a trace left, by id."""
        self._copies.update(copies)


def copies(objects: Objects, left: Iterable[Left], blobs: Mapping[str, Saved]) -> dict[str, Copy]:
    """Return the variables that a trace left, by id.

    Args:
        objects: the table that the trace left.
        left: the variables in the table.
        blobs: the saved tensors that the table names, by blob id.

    A copy has no stacks, because a client sends none either.
    """
    objects = stacks.without(objects) if left else objects
    return {one.variable.id: Copy(one.variable.version, objects, one.index, blobs) for one in left}


def _names(trace: pb.Trace) -> dict[int, list[str]]:
    """The shared names of the entries of a trace's scope, in the order of the trace."""
    names: dict[int, list[str]] = {}
    for binding in trace.shared:
        if binding.value.WhichOneof("kind") == "ref":
            names.setdefault(binding.value.ref, []).append(binding.name)
    return names


def _at(saves: pb.Saves, value: Value | None) -> Value | None:
    return saves.objects.values[value.ref] if value is not None and value.WhichOneof("kind") == "ref" else None


def _splice(scope: Objects, objects: Objects, moved: Mapping[int, int]) -> None:
    """Add the entries of a table to the scope of a trace.

    Args:
        moved: the indices of the table that take the place of entries of the scope.
    """
    first = len(scope.values)
    for index, value in enumerate(objects.values):
        added = scope.values.add(none=True)
        if index in moved:
            added = scope.values[moved[index]]
        added.CopyFrom(value)
        for one in nested([added]):
            if one.WhichOneof("kind") == "ref":
                one.ref = moved.get(one.ref, first + one.ref)
            elif one.WhichOneof("kind") == "tensor" and one.tensor.WhichOneof("payload") == "blob":
                view = TensorView(dtype=one.tensor.dtype, shape=one.tensor.shape)
                one.remote.CopyFrom(RemoteTensor(blob_id=one.tensor.blob.id, view=view, library=one.tensor.library))
