"""A pass of the model in segments: blocks run at the breaks between them.

A block that cannot be a plan waits between the modules. So the pass is captured as a chain of graphs, which is broken at the
locations that blocks asked for in recent steps. Between two graphs a block gets what a module's hook would give it. The tensors
there are the graphs' own memory, in which every replay leaves its values. A change in place is written into that memory. A value
that a block assigns goes into a tensor beside it, with which the next segment goes on, because other code of the model may hold
the first tensor too.

No block says beforehand what it will ask for. If a block asks for a location without a break, the step begins again, eager and
with hooks: at each break that was passed, the values of the first run are put in place, and nobody is served again. The same
kernels run on the same rows, and write the same keys and values to the same slots of the cache. So the blocks go on as if the
pass had never been in segments. The next chain has a break there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from executor.model.bits import same_bits
from executor.model.hooks import Hooks, Spot
from executor.model.node import Node

# A break is kept for so many steps with blocks after a block asked for it, and so many breaks at most.
REMEMBERED, MOST_BREAKS = 64, 128


@dataclass(eq=False)
class Break:
    """A place between two segments.

    Attributes:
        spot: the hook that is called there.
        at: the locations there: the module, the kind of location, and what its hook is given. The last is the spot's own.
        onward: what the next segment goes on with: `value`, or a copy beside it for what blocks assign.
        rows: the rows of the batch's tensors.
        before, after: `value` and `onward` as the next segment found them.
    """

    spot: Spot
    at: list[tuple[Node, str, Any]]
    onward: Any
    rows: int
    before: Any = None
    after: Any = None

    @classmethod
    def of(cls, spot: Spot, at: list[tuple[Node, str, Any]], apart: bool, rows: int) -> Break:
        """Return a break; if it is `apart`, the next segment goes on with a copy beside the value."""
        value = at[-1][2]
        return cls(spot, at, _mapped(value, rows, torch.empty_like) if apart else value, rows)

    @property
    def value(self) -> Any:
        """What the spot's hook is given."""
        return self.at[-1][2]

    @property
    def apart(self) -> bool:
        """Whether the next segment goes on with a copy."""
        return self.onward is not self.value

    def pass_by(self) -> None:
        """Let the next segment go on without a visit."""
        if self.apart:
            _fill(self.onward, self.value)

    def keep(self) -> None:
        """Copy what the next segment begins with; the first work of that segment."""
        self.before = _mapped(self.value, self.rows, torch.clone)
        self.after = _mapped(self.onward, self.rows, torch.clone) if self.apart else self.before


class Pass(Protocol):
    """One pass of the model in segments.

    Attributes:
        spots: its breaks.
    """

    spots: frozenset[Spot]

    def go_on(self) -> Break | None:
        """Run the next segment; return the break where it ends, None at the end of the pass."""

    def give_up(self) -> None:
        """End the pass where it is."""


@dataclass(eq=False)
class _Passed:
    """A break that the pass has come to.

    Attributes:
        at: the break.
        assigned: whether the model goes on with another value than the hook's.
        before, after: the values there when the blocks had gone on, and what the model goes on with.
    """

    at: Break
    assigned: bool = False
    before: Any = None
    after: Any = None


@dataclass(frozen=True)
class Breaks:
    """Where a pass is broken.

    Attributes:
        spots: the hooks.
        apart: the hooks whose values blocks assign anew.
    """

    spots: frozenset[Spot] = frozenset()
    apart: frozenset[Spot] = frozenset()

    def __ge__(self, other: Breaks) -> bool:
        return self.spots >= other.spots and self.apart >= other.apart


class Asked:
    """What blocks asked for in recent steps, and which of these values they assigned anew.

    Attributes:
        breaks: the breaks that steps are likely to need.
    """

    def __init__(self) -> None:
        self.breaks = Breaks()
        self._now = 0
        self._asked: dict[Spot, int] = {}  # the last step of each, the last asked for at the end
        self._assigned: dict[Spot, int] = {}

    def note(self, asked: Iterable[Spot], assigned: Iterable[Spot]) -> None:
        """Note what blocks did in a step."""
        self._now += 1
        if self._noted(self._asked, asked) | self._noted(self._assigned, assigned):
            self.breaks = Breaks(frozenset(self._asked), frozenset(self._asked) & frozenset(self._assigned))

    def _noted(self, known: dict[Spot, int], spots: Iterable[Spot]) -> bool:
        """Note the hooks of a step; return whether others are known now."""
        moved = False
        for spot in spots:
            moved |= known.pop(spot, None) is None
            known[spot] = self._now
        while known:
            oldest = next(iter(known))
            if len(known) <= MOST_BREAKS and self._now - known[oldest] <= REMEMBERED:
                break
            del known[oldest]
            moved = True
        return moved


def run(
    segments: Pass | None,
    hooks: Hooks,
    begin: Callable[[], None],
    eager: Callable[[], None],
) -> bool:
    """Run a step with blocks in segments; if that cannot be, run it eager.

    Args:
        segments: the pass; None: the step runs eager.
        hooks: where the blocks are served.
        begin: begins the step of the blocks.
        eager: runs the model once with hooks, on the same inputs and padding.

    Returns:
        Whether the step ran in segments to its end.
    """
    hooks.hold()
    begin()
    passed: list[_Passed] = []
    if segments is not None:
        fits = True
        while fits and hooks.asked.keys() <= segments.spots:
            at = segments.go_on()
            if at is None:
                return True
            passed.append(_Passed(at))
            fits = _serve(passed[-1], hooks)
        segments.give_up()
    with _putting_back(passed, hooks):
        eager()
    return False


def _serve(passed: _Passed, hooks: Hooks) -> bool:
    """Serve the blocks at a break.

    Returns:
        Whether the next segment can go on with what they made of the value.
    """
    at = passed.at
    value = at.value
    if at.spot in hooks.asked:
        for node, kind, given in at.at:
            value = hooks.come(node, kind, given)
    passed.assigned = value is not at.value
    if not at.apart and not passed.assigned:
        return True
    if at.apart and _fill(at.onward, value):
        return True
    passed.before, passed.after = at.value, value
    return False


@contextmanager
def _putting_back(passed: list[_Passed], hooks: Hooks) -> Iterator[None]:
    """Return a context for an eager pass that goes on where blocks have come to.

    The hooks of the blocks are called after the last break that was passed.
    """
    if not passed:
        hooks.release()
        yield
        return
    for one in passed[:-1]:
        one.before, one.after = one.at.before, one.at.after
    last = passed[-1]
    if last.before is None:  # all that was asked for there has a break, or was assigned as it should
        last.before, last.after = last.at.value, last.at.onward
    coming = iter(passed)
    following: list[_Passed | None] = [next(coming)]

    def put_back(node: Node, kind: str, value: Any) -> Any:
        one = following[0]
        if one is None or (node.path, kind) != one.at.spot:
            return value
        following[0] = next(coming, None)
        _put(value, one.before)
        if one is last:
            hooks.release()
        return one.after if one.assigned else value

    restoring = Hooks(hooks.tree, put_back)
    for one in passed:
        restoring.add(*one.at.spot)
    try:
        yield
        if following[0] is not None:
            raise RuntimeError(f"the model did not come to {following[0].at.spot} again")
    finally:
        restoring.clear()


def _mapped(value: Any, rows: int, do: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # [rows, ...] each
    """Return a value with `do` applied to each tensor that has the rows of the batch."""
    if isinstance(value, torch.Tensor):
        return do(value) if value.dim() > 0 and value.shape[0] == rows else value
    if isinstance(value, tuple):
        items = [_mapped(item, rows, do) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_mapped(item, rows, do) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, rows, do) for key, item in value.items()}
    return value


def _pairs(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of two values side by side.

    Raises:
        ValueError: the values are not built alike.
    """
    if isinstance(one, tuple | list):
        if not isinstance(other, tuple | list) or len(one) != len(other):
            raise ValueError("another number of items")
        for pair in zip(one, other, strict=True):
            yield from _pairs(*pair)
    elif isinstance(one, dict):
        if not isinstance(other, dict) or one.keys() != other.keys():
            raise ValueError("other names")
        for key in one:
            yield from _pairs(one[key], other[key])
    else:
        yield one, other


def same_rows(value: Any, other: Any, rows: int, used: int) -> bool:
    """Return whether two values have the same bits in the used rows of the batch.

    Args:
        value, other: values of one location.
        rows: the rows of the batch's tensors.
        used: how many of these belong to requests.
    """
    for one, two in _pairs(value, other):
        batched = isinstance(one, torch.Tensor) and one.dim() > 0 and one.shape[0] == rows
        if batched and (two.shape != one.shape or not same_bits(one[:used], two[:used])):
            return False
    return True


def _put(value: Any, before: Any) -> None:
    """Copy what a value was into its tensors."""
    pairs = [(now, then) for now, then in _pairs(value, before) if isinstance(now, torch.Tensor) and now is not then]
    for now, then in pairs:
        now.copy_(then)


def _fill(onward: Any, value: Any) -> bool:
    """Copy a value into the tensors that the next segment goes on with; return whether it fits."""
    try:
        items = list(_pairs(onward, value))
    except ValueError:
        return False
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for mine, new in items:
        if mine is new:
            continue
        if not isinstance(mine, torch.Tensor) or not isinstance(new, torch.Tensor):
            return False
        if (mine.shape, mine.dtype, mine.device) != (new.shape, new.dtype, new.device):
            return False
        copies.append((mine, new))
    if copies:
        torch._foreach_copy_([mine for mine, _ in copies], [new for _, new in copies])
    return True
