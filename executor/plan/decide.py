"""Decisions on values in a traced step: both ways are traced, and each row keeps its own.

A tensor program has no branches. So both ways of a decision become operations of the program, one after the other. An operation
in place writes where its way is taken alone. A name that the ways leave bound to different tensors becomes a choice between
them. A list gets an item if the condition holds. What cannot be chosen afterwards is refused in a way: a save, and an assignment
to a value of the model. The numbers that a block takes out of tensors stay tensors, in the precision that Python computes with.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch

from executor.core.text import clip
from executor.model.module_name import ModuleName
from executor.plan import choices
from executor.plan.containers import Written
from executor.plan.library import is_function
from executor.plan.record import DECIDE, Recorder
from executor.plan.refuse import Refused
from executor.plan.step import Step
from executor.plan.symbols import Number, Symbol, Truth
from executor.plan.trace import Tracing
from interpose.capture.rewrite import GUARD, SAVE

_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size, Step)
_MOST_WAYS = 512  # of one step; each is traced


@dataclass(frozen=True)
class _Held:
    """A container that a way may not change.

    Attributes:
        container: the container.
        items: what it holds.
    """

    container: Any
    items: tuple[Any, ...]

    @classmethod
    def of(cls, container: Any) -> _Held:
        return cls(container, _items(container))

    def same(self) -> bool:
        now = _items(self.container)
        return len(now) == len(self.items) and all(one is other for one, other in zip(now, self.items, strict=True))


class Decisions:
    """The decisions of one traced step.

    Args:
        recorder: records the operations.
        tracing: the step.
        names: the names that the traced code runs with.
        tracers: the names that are bound to the tracer.

    Attributes:
        torn: the names that the ways of a decision left bound to what cannot be chosen from, with the line of the decision.
        taken: the line where a number was taken out of a tensor first; None: none was.
    """

    def __init__(
        self, recorder: Recorder, tracing: Tracing, names: dict[str, Any], tracers: frozenset[str] = frozenset()
    ) -> None:
        self.torn: dict[str, int] = {}
        self.taken: int | None = None
        self._recorder = recorder
        self._tracing = tracing
        self._names = names
        self._ways = 0
        self._hidden = {name for name in names if name in ("__name__", "__builtins__", SAVE, GUARD)} | tracers
        helpers = {
            choices.WAYS: self.ways,
            choices.EITHER: self.either,
            choices.BOTH: self.both,
            choices.ANY: self.any,
            choices.NOT: self.negated,
            choices.NUMBER: self.number,
            choices.ITEM: self.item,
            choices.SAME: self.same,
            choices.CHAIN: self.chain,
        }
        names |= helpers
        self._hidden |= helpers.keys() | {choices.WAY}

    def line(self) -> int:
        """Return the notebook's line that runs now."""
        return self._recorder.line()

    def _refuse(self, what: str, instead: str = DECIDE) -> NoReturn:
        raise Refused(self.line(), what, instead)

    # Values that leave the tensors.

    def number(self, function: Any, value: Any) -> Any:
        """Return `float(x)`, `int(x)` or `bool(x)`."""
        if isinstance(value, torch.Tensor) and function in (float, int, bool):
            scalar = self._scalar(value)
            if function is bool:
                return Truth(scalar if scalar.dtype == torch.bool else scalar != 0, self._recorder)
            if function is int and scalar.is_floating_point():
                self._refuse("int() rounds a number of a tensor")
            return Number(scalar.to(torch.float64 if function is float else torch.int64), self._recorder)
        if isinstance(value, Number) and function is float and value.tensor.is_floating_point():
            return value
        if isinstance(value, Symbol) and function is bool:
            return Truth(self._condition(value), self._recorder)
        return function(value)

    def item(self, value: Any) -> Any:
        """Return `x.item()`."""
        if not isinstance(value, torch.Tensor):
            return value.item()
        scalar = self._scalar(value)
        if scalar.dtype == torch.bool:
            return Truth(scalar, self._recorder)
        return Number(scalar.to(torch.float64 if scalar.is_floating_point() else torch.int64), self._recorder)

    def _scalar(self, value: torch.Tensor) -> torch.Tensor:  # any shape of one element; returns []
        if value.numel() != 1 or value.dtype.is_complex or value.dtype == torch.uint64:
            self._refuse("a number is taken out of a tensor that is none")
        if value.device.type != self._recorder.device.type:
            self._refuse("a number is taken out of a tensor on another device")
        if self.taken is None:
            self.taken = self.line()
        return value.reshape(()).clone()  # the block has the number of this moment

    def _condition(self, test: Any) -> torch.Tensor | None:  # []
        """Return the scalar bool that decides; None if no tensor does."""
        if isinstance(test, Truth):
            return test.tensor
        if isinstance(test, Number):
            return test.tensor != 0
        if isinstance(test, torch.Tensor):
            scalar = self._scalar(test)
            return scalar if scalar.dtype == torch.bool else scalar != 0
        return None

    # Conditions.

    def negated(self, test: Any) -> Any:
        """Return `not a`."""
        condition = self._condition(test)
        return not test if condition is None else Truth(condition.logical_not(), self._recorder)

    def both(self, first: Any, second: Callable[[], Any]) -> Any:
        """Return the truth of `a and b`."""
        condition = self._condition(first)
        if condition is None:
            return first and second()
        other = self._second(condition, second)
        if isinstance(other, bool):
            return Truth(condition, self._recorder) if other else False
        return Truth(condition & other, self._recorder)

    def any(self, first: Any, second: Callable[[], Any]) -> Any:
        """Return the truth of `a or b`."""
        condition = self._condition(first)
        if condition is None:
            return first or second()
        other = self._second(condition.logical_not(), second)
        if isinstance(other, bool):
            return True if other else Truth(condition, self._recorder)
        return Truth(condition | other, self._recorder)

    def chain(self, signs: Sequence[str], one: Any, other: Any, *later: Callable[[], Any]) -> Any:
        """Return the truth of `a < b < c`.

        Args:
            signs: the comparisons, by their names in Python's module operator.
            one, other: the first two values.
            later: give the values after them.
        """
        first = getattr(operator, signs[0])(one, other)
        if not later:
            return first
        return self.both(first, lambda: self.chain(signs[1:], other, later[0](), *later[1:]))

    def _second(self, condition: torch.Tensor, second: Callable[[], Any]) -> torch.Tensor | bool:  # []
        """Return the truth of what is asked under a condition alone; a bool if no tensor decides it."""
        way = _Way(self, condition)
        value = second()
        way.end()
        other = self._condition(value)
        return bool(value) if other is None else other

    def same(self, one: Any, other: Any) -> bool:
        """Return `a is b`."""
        if one is not None and other is not None and any(map(self._is_made, (one, other))):
            self._refuse("what a decision chose is compared by identity")
        return one is other

    def _is_made(self, value: Any) -> bool:
        """Return whether a value stands for other objects of the block."""
        return isinstance(value, Symbol) or (isinstance(value, torch.Tensor) and self._recorder.is_chosen(value))

    # Ways.

    def ways(self, test: Any) -> Iterator[bool]:
        """Yield the ways that an `if` takes: one of them if no tensor decides, else both."""
        condition = self._condition(test)
        if condition is None:
            yield bool(test)
            return
        before, left = dict(self._names), []
        for way in (True, False):
            one = _Way(self, condition if way else condition.logical_not())
            yield way
            one.end()
            left.append(dict(self._names))
            for name in [name for name in self._names if name not in before]:
                del self._names[name]
            self._names.update(before)
        self._merge(condition, *left)

    def either(self, test: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """Return `a if test else b`."""
        condition = self._condition(test)
        if condition is None:
            return first() if test else second()
        made = []
        for way, value in ((condition, first), (condition.logical_not(), second)):
            one = _Way(self, way)
            made.append(value())
            one.end()
        chosen = self._chosen(condition, *made)
        if chosen is _NONE:
            self._refuse("a decision on a value chooses between values of two kinds", DECIDE)
        return chosen

    def _merge(self, condition: torch.Tensor, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:  # []
        """Bind the names to what the ways left."""
        for name in {**one, **other}:
            if name in self._hidden:
                continue
            if name in one and name in other:
                chosen = self._chosen(condition, one[name], other[name])
                if chosen is not _NONE:
                    self._names[name] = chosen
                    continue
            if hasattr(builtins, name):
                self._refuse(
                    f"a value decides what {name} is, and a function of Python's has this name", "use another name"
                )
            self._names.pop(name, None)
            self.torn[name] = self.line()

    def _chosen(self, condition: torch.Tensor, one: Any, other: Any) -> Any:  # []
        """Return what stands for one of two values; `_NONE` if nothing can."""
        if one is other:
            return one
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            alike = (one.shape, one.dtype, one.stride(), one.device) == (
                other.shape,
                other.dtype,
                other.stride(),
                other.device,
            )
            if not alike or one.device.type != self._recorder.device.type:
                return _NONE
            made = torch.where(condition, one, other)
            if made.stride() != one.stride():
                return _NONE
            # Another name of one of them would see a change of it, and of the choice.
            self._recorder.freeze((one, other, made))
            return made
        if isinstance(one, Symbol) and type(one) is type(other) and one.tensor.dtype == other.tensor.dtype:
            return type(one)(torch.where(condition, one.tensor, other.tensor), self._recorder)
        plain = type(one) is type(other) and isinstance(one, bool | int | float | str | bytes)
        if plain and one == other and (not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other)):
            return one
        return _NONE

    # What a way may not change.

    def held(self) -> list[_Held]:
        """Return the containers that traced code can reach.

        Raises:
            Refused: it can reach an object that may change in another way.
        """
        found: list[_Held] = []
        seen: set[int] = set()
        todo = [value for name, value in self._names.items() if name not in self._hidden]
        todo += self._tracing.reached()
        while todo:
            value = todo.pop()
            if isinstance(value, (*_PLAIN, torch.Tensor, Symbol, ModuleName, ModuleType, Written)) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, list | tuple | dict | set | frozenset):
                one = _Held.of(value)
                found.append(one)
                todo.extend(one.items)
            elif isinstance(value, FunctionType) and not is_function(value):
                if _compares_identity(value.__code__):
                    self._refuse("a function compares objects by identity beside a decision on a value")
                cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
                todo.extend((*cells, *(value.__defaults__ or ()), value.__kwdefaults__ or {}, vars(value)))
            elif not (is_function(value) or _is_library(value) or isinstance(value, type)):
                self._refuse(f"a {clip(type(value).__name__)} stands beside a decision on a value", DECIDE)
        return found

    def enter(self, condition: torch.Tensor) -> torch.Tensor | None:  # []
        """Begin a way; return the condition of the way around it."""
        self._ways += 1
        if self._ways > _MOST_WAYS * 2:
            self._refuse(f"more than {_MOST_WAYS} decisions on values in one step")
        self._tracing.turn_way()
        outer = self._recorder.condition
        self._recorder.condition = condition if outer is None else outer & condition
        return outer

    def leave(self, outer: torch.Tensor | None, held: Iterable[_Held]) -> None:  # []
        """End a way."""
        self._tracing.turn_way()
        self._recorder.condition = outer
        if not all(one.same() for one in held):
            self._refuse(
                "a list, a dict or a value of the model gets another item where a value decides",
                "change a tensor in place: h[:] = ..., or decide with torch.where(condition, a, b)",
            )


class _Way:
    """One way of a decision, from its beginning on."""

    def __init__(self, decisions: Decisions, condition: torch.Tensor) -> None:  # []
        self._decisions = decisions
        self._outer = decisions.enter(condition)
        self._held = decisions.held()

    def end(self) -> None:
        """End it; no container has changed."""
        self._decisions.leave(self._outer, self._held)


_NONE = object()


def _items(container: Any) -> tuple[Any, ...]:
    if isinstance(container, dict):
        return (*container.keys(), *container.values())
    return tuple(iter(container))


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _is_library(value: object) -> bool:
    """Return whether a value is a function of a module, not of an object that it would change."""
    return isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType | None)


@functools.lru_cache(256)
def _compares_identity(code: CodeType) -> bool:
    """Return whether code compares objects by `is`, other than with None, True and False."""
    before: Any = None
    for one in dis.get_instructions(code):
        constant = before is not None and before.opname == "LOAD_CONST"
        if one.opname == "IS_OP" and not (constant and before.argval in (None, True, False)):
            return True
        before = one
    return any(_compares_identity(one) for one in code.co_consts if isinstance(one, CodeType))
