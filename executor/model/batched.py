"""A location's value for several requests at once: one copy, one comparison, one write.

Each block still gets private copies of its own rows, with memory of their own: a block that keeps a copy keeps no other request's
rows. The rows of all requests are copied by one operation, when the first of their blocks looks at the tensor. A tensor at which
no block looks is not copied.

When the blocks have had their turns, the copies whose version counter stands still are compared with the model's rows by one
operation, and changed copies are written into the model's rows by one operation. That is right only for blocks that have no rows
and no objects in common. A block that assigned a value, or that looks at a value computed from the location's tensors, is settled
by itself, as of `executor.model.values`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from executor.core.location import Location
from executor.model.bits import bits
from executor.model.items import Later, Opaque, Outputs, Path, Spot, outputs_like
from executor.model.layouts import WHOLE, Layout
from executor.model.rows import BatchRows, copied
from executor.model.values import Leaf, Served

# References to a tuple of values that no block holds: of the member or the tuple around it, of `_fix`, and of `getrefcount`.
_UNHELD = 3


def row_bytes(value: Any) -> int:
    """Return the bytes that one row of a location's value has at most."""
    if isinstance(value, torch.Tensor):
        return value.nbytes // max(1, value.shape[0] if value.dim() else 1)
    if isinstance(value, tuple | list):
        return sum(map(row_bytes, value))
    return sum(map(row_bytes, value.values())) if isinstance(value, dict) else 0


class BatchTensor:
    """One tensor of a location, for several requests.

    Attributes:
        original: the model's tensor, [batch rows, ...].
        paths: where it is in the location's value.
        copies: the private copies, by request, once a block has looked at the tensor; None for a request that has left.
        taken: which blocks have looked at it.
        version: the version counter of a copy that was not changed.
    """

    def __init__(self, original: torch.Tensor, path: Path, layout: Layout, rows: BatchRows) -> None:
        self.original = original
        self.paths = [path]
        self.layout = layout
        self.copies: list[torch.Tensor | None] | None = None
        self.taken = [False] * len(rows.parts)
        self.version = 0
        self._rows = rows
        self._parts: list[torch.Tensor] | None = None
        # The ranks gather together, whether a block looks at the tensor or not.
        self._gathered = None if layout is WHOLE else layout.gather(rows.joined(original))

    def parts(self) -> list[torch.Tensor]:  # [rows, ..., part] each
        """Return what this rank holds of each request's rows, as views of the model's tensor."""
        if self._parts is None:
            self._parts = self._rows.split(self.original)
        return self._parts

    def before(self) -> Sequence[torch.Tensor]:  # [rows, ..., features] each
        """Return what each block was given."""
        return self.parts() if self._gathered is None else self._gathered.split(self._rows.lengths)

    def take(self, index: int) -> torch.Tensor:  # [rows, ..., features]
        """Return a block's copy; its block looks at the tensor."""
        copies = self.copies
        if copies is None:
            copies = self._copy()
        self.taken[index] = True
        found = copies[index]
        assert found is not None
        return found

    def _copy(self) -> list[torch.Tensor | None]:  # [rows, ..., features] each
        """Copy the rows of all requests.

        This is done in a block's turn, but not in the modes that the block may have opened.
        """
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)  # leaving the mode brings back the mode of gradients too
            if self._gathered is None:
                made = self._rows.copies(self.original)
            else:
                made = copied(list(self._gathered.split(self._rows.lengths)))
        self.version = made[0]._version
        self.copies = list(made)
        return self.copies

    def leaf(self, index: int) -> Leaf:
        """Return a request's rows and copy as one tensor of a served value."""
        before, private = self.before()[index], self.take(index)
        return Leaf(self.original, self.layout, private, self.version, before, self.parts()[index].shape)

    def release(self, index: int) -> None:
        """Let go of the copy of a request that leaves."""
        self.taken[index] = False
        if self.copies is not None:
            self.copies[index] = None


class _Taken(Later):
    """A block's copy of a tensor, made when the block looks at it."""

    __slots__ = ("_index", "_tensor")

    def __init__(self, tensor: BatchTensor, index: int) -> None:
        self._tensor = tensor
        self._index = index

    def made(self) -> torch.Tensor:  # [rows, ..., features]
        return self._tensor.take(self._index)


class BatchValue:
    """A location's value for several requests.

    Args:
        value: the engine's value.
        rows: the rows of the requests in it.
        layout_of: as of `Served`.

    Attributes:
        original: the engine's value.
        rows: as given.
        tensors: the tensors of the value that have the batch's rows.
        simple: whether the value is of tensors, tuples and empty dicts: whether a block has assigned in it can be told without
            looking at every item.
    """

    def __init__(self, value: Any, rows: BatchRows, layout_of: Callable[[Path], Layout]) -> None:
        self.original = value
        self.rows = rows
        self.tensors: list[BatchTensor] = []
        self.simple = True
        self._layout_of = layout_of
        self._find(value, ())
        # The items of a tuple of tensors and None, which is what most modules return; None for any other value.
        self._items: list[BatchTensor | None] | None = None
        if type(value) is tuple and all(item is None or isinstance(item, torch.Tensor) for item in value):
            known = [self._known(item) for item in value]
            if all((one is None) == (item is None) for one, item in zip(known, value, strict=True)):
                self._items = known

    def _find(self, value: Any, path: Path) -> None:
        if isinstance(value, torch.Tensor):
            known = self._known(value)
            if known is not None:
                known.paths.append(path)
            elif value.dim() > 0 and self.rows.parts[0].holds(value):
                self.tensors.append(BatchTensor(value, path, self._layout_of(path), self.rows))
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                self._find(item, (*path, i))
        elif isinstance(value, list | dict):
            self.simple = self.simple and isinstance(value, dict) and not value
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self._find(item, (*path, key))

    def shown_to(self, member: Member, index: int) -> Any:
        """Return the value as a block gets it; copies are made when the block looks at them."""
        if self._items is not None:
            items = [None if tensor is None else _Taken(tensor, index) for tensor in self._items]
            return Outputs(items, member._spot)
        return self._shown(self.original, index, member, ())

    def _known(self, value: Any) -> BatchTensor | None:  # any shape
        for tensor in self.tensors:
            if tensor.original is value:
                return tensor
        return None

    def _shown(self, value: Any, index: int, member: Member, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = self._known(value)
            if tensor is not None:
                return _Taken(tensor, index)
            shape = list(value.shape)
            return Opaque(f"a tensor of shape {shape} at {member.location} whose rows do not belong to single requests")
        if isinstance(value, tuple):
            items = [self._shown(item, index, member, (*path, i)) for i, item in enumerate(value)]
            return outputs_like(value, items, member._spot, path)
        if isinstance(value, list):
            items = [_now(self._shown(item, index, member, (*path, i))) for i, item in enumerate(value)]
            return outputs_like(value, items, member._spot, path)
        if isinstance(value, dict):
            names = {name: _now(self._shown(item, index, member, (*path, name))) for name, item in value.items()}
            member._dicts.append(names)
            return names
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return Opaque(f"a {type(value).__name__} at {member.location}")


def _now(value: Any) -> Any:
    return value.made() if isinstance(value, Later) else value


class Member(Served):
    """One location of one request in one step, which blocks of other requests are at too.

    Args:
        batch: the location's value for all these requests.
        index: the request's index among them.
        at: the location as the block asked for it.
    """

    def __init__(self, batch: BatchValue, index: int, at: Location) -> None:
        self.at = at
        self.written = False
        self.differs = []
        self.put = []
        self._batch = batch
        self._index = index
        self._derived = []
        self._original = batch.original
        self._spot = Spot(at)
        self._assigned = False
        self._dicts: list[dict[str, Any]] = []
        self._shown = batch.shown_to(self, index)

    @property
    def location(self) -> str:  # type: ignore[override]
        """The location's name."""
        return str(self.at)

    @property
    def value(self) -> Any:
        """What the block sees."""
        shown = self._shown
        if isinstance(shown, Later):
            shown = self._shown = shown.made()
        return shown

    @value.setter
    def value(self, value: Any) -> None:
        self._assigned = True
        self._shown = value

    @property
    def plain(self) -> bool:
        """Whether the block can have changed nothing but copies, in place."""
        return self._batch.simple and not (self._assigned or self._spot.assigned or self._derived or any(self._dicts))

    def given(self) -> list[torch.Tensor]:  # [rows, ...]
        found = [_copy_of(tensor, self) for tensor in self._batch.tensors if tensor.taken[self._index]]
        if self._derived:
            found += [derived.value for _, derived in self._derived]
        return found

    def fix(self) -> None:
        """Make the copies that are not made yet, if the block may look at them after it has gone on."""
        if isinstance(self._shown, Outputs):
            _fix(self._shown, held=False)

    def settle(self, current: Any) -> Any:
        self._leaves = [tensor.leaf(self._index) for tensor in self._batch.tensors]
        self._rows = self._batch.rows.parts[self._index]
        if isinstance(self._shown, Outputs):
            _fix(self._shown, held=True)
        return super().settle(current)

    def leave(self) -> None:
        super().leave()
        for tensor in self._batch.tensors:
            if tensor.taken[self._index]:
                tensor.release(self._index)


def _fix(values: Outputs, held: bool) -> None:
    """Make the copies in a tuple that are not made yet.

    Args:
        values: the tuple.
        held: whether to make them in any case; otherwise in the tuples to which a block still has a reference.
    """
    held = held or sys.getrefcount(values) > _UNHELD
    if held:
        for item in values:
            if isinstance(item, Outputs):
                _fix(item, held)
    else:
        for cell in tuple.__iter__(values):
            if isinstance(cell.held, Outputs):
                _fix(cell.held, held)


def settle(members: Sequence[Member], current: Any) -> None:
    """Write what blocks changed in place into the model's tensors, for all of them at once.

    Called in the engine's inference mode. `written`, `differs` and `put` of the members say what was changed.

    Args:
        members: blocks at one location whose values are `plain`.
        current: what the model would go on with: the value that was served, or what other blocks made of it since.

    Raises:
        Exception: a change does not fit; nothing is known of which was written, and each member is to be settled by itself.
    """
    if not members:
        return
    for member in members:
        member.fix()
    batch = members[0]._batch
    found = [(tensor, *_look(tensor, members)) for tensor in batch.tensors if tensor.copies is not None]
    for tensor, changed, _, _ in found:
        parts = tensor.before()
        if any(_copy_of(tensor, member).shape != parts[member._index].shape for member in changed):
            raise ValueError("a copy's shape has changed")
    for tensor, changed, possible, flags in found:  # all looked at before a write: the tensors may share memory
        _write(tensor, changed + possible, current, batch.rows)
        for member in changed:
            member.written = True
            member.put.append((_copy_of(tensor, member), None))
        for member, differs in zip(possible, flags, strict=True):
            member.differs.append(differs)
            member.put.append((_copy_of(tensor, member), differs))


def _copy_of(tensor: BatchTensor, member: Member) -> torch.Tensor:  # [rows, ..., features]
    assert tensor.copies is not None
    copy = tensor.copies[member._index]
    assert copy is not None
    return copy


def _look(tensor: BatchTensor, members: Sequence[Member]) -> tuple[list[Member], list[Member], Sequence[torch.Tensor]]:
    """Find out which members' copies were changed.

    Returns:
        The members whose copies were changed, the members whose copies were perhaps, and what says so: scalars on the device.
    """
    taken, copies, version = tensor.taken, tensor.copies, tensor.version
    assert copies is not None
    changed: list[Member] = []
    still: list[Member] = []
    for member in members:
        if taken[member._index]:
            copy: Any = copies[member._index]
            (still if copy._version == version else changed).append(member)
    if not still:
        return changed, [], ()
    with torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)
        now = torch.cat([_copy_of(tensor, member) for member in still])
        before = _before(tensor, still)
        if now.dtype != before.dtype or now.device != before.device or now.shape != before.shape:
            raise ValueError("a copy has become another tensor")
        same = bits(now), bits(before)
        if now.device.type == "cpu":
            if not torch.equal(*same):
                parts = tensor.before()
                for member in still:
                    if not torch.equal(bits(_copy_of(tensor, member)), bits(parts[member._index])):
                        changed.append(member)
            return changed, [], ()
        differs = torch.ne(*same).flatten(1).any(1)
        lengths = [tensor._rows.lengths[member._index] for member in still]
        if len(lengths) == differs.shape[0]:
            return changed, still, differs.unbind()
        return changed, still, [one.any() for one in differs.split(lengths)]


def _before(tensor: BatchTensor, members: Sequence[Member]) -> torch.Tensor:  # [rows of all, ..., features]
    rows = tensor._rows
    if rows.complete and len(members) == len(rows.parts):
        return rows.joined(tensor.original) if tensor._gathered is None else tensor._gathered
    parts = tensor.before()
    return torch.cat([parts[member._index] for member in members])


def _write(tensor: BatchTensor, members: Sequence[Member], current: Any, rows: BatchRows) -> None:
    """Write members' copies into the model's rows."""
    if not members:
        return
    copies = [_copy_of(tensor, member) for member in members]
    parts = tensor.parts()
    into = [parts[member._index] for member in members]
    mine = copies if tensor.layout is WHOLE else [tensor.layout.scatter(copy) for copy in copies]
    torch._foreach_copy_(into, mine)
    for path in tensor.paths:
        now = current
        for key in path:
            now = now[key]
        if now is not tensor.original:  # the model goes on with another block's replacement
            torch._foreach_copy_([rows.parts[member._index].of(now) for member in members], mine)
