"""The number of a step, as a block that becomes a plan sees it: comparisons become guards.

A plan is traced in one step and serves every step in which its guards hold. Arithmetic with constants stays an expression of
the step. A use that needs the number itself, as an index does, makes the plan one for this step alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Expression:
    """An integer that is computed from the step.

    Attributes:
        operations: operator, number, and whether the number stands on the left, one after the other.
    """

    operations: tuple[tuple[str, int, bool], ...] = ()

    def of(self, step: int) -> int:
        """Return the value in a step.

        Raises:
            ZeroDivisionError: the block divides by zero in this step.
        """
        value = step
        for sign, number, left in self.operations:
            do = _ARITHMETIC[sign]
            value = do(number, value) if left else do(value, number)
        return value


@dataclass(frozen=True)
class Guard:
    """What the block found when it compared the step.

    Attributes:
        expression: the compared value.
        sign: the comparison.
        number: what it was compared with.
        outcome: what came out.
    """

    expression: Expression
    sign: str
    number: int
    outcome: bool

    def holds(self, step: int) -> bool:
        """Return whether a step would give the same outcome."""
        try:
            return _COMPARISONS[self.sign](self.expression.of(step), self.number) is self.outcome
        except ZeroDivisionError:
            return False


class Step:
    """The step's number while its block is traced.

    Args:
        now: the step in which the block is traced.
        guards: gets a guard for each comparison.
        expression: how the value is computed from the step.
    """

    __slots__ = ("_guards", "_now", "expression")

    def __init__(self, now: int, guards: list[Guard], expression: Expression = Expression()) -> None:
        self._now = now
        self._guards = guards
        self.expression = expression

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with the number itself, in place where the function is."""
        return function(*map(_number, args), **{name: _number(value) for name, value in (kwargs or {}).items()})

    def _compared(self, sign: str, other: Any) -> Any:
        if isinstance(other, Step):
            other = int(other)
        if not isinstance(other, int):
            return _COMPARISONS[sign](int(self), other)
        guard = Guard(self.expression, sign, int(other), _COMPARISONS[sign](self.expression.of(self._now), other))
        if guard not in self._guards:
            self._guards.append(guard)
        return guard.outcome

    def _computed(self, sign: str, other: Any, left: bool = False) -> Any:
        if isinstance(other, Step):
            other = int(other)
        if type(other) is not int:
            do = _ARITHMETIC[sign]
            return do(other, int(self)) if left else do(int(self), other)
        made = Expression((*self.expression.operations, (sign, other, left)))
        made.of(self._now)
        return Step(self._now, self._guards, made)

    def __eq__(self, other: object) -> Any:
        return self._compared("==", other)

    def __ne__(self, other: object) -> Any:
        return self._compared("!=", other)

    def __lt__(self, other: Any) -> Any:
        return self._compared("<", other)

    def __le__(self, other: Any) -> Any:
        return self._compared("<=", other)

    def __gt__(self, other: Any) -> Any:
        return self._compared(">", other)

    def __ge__(self, other: Any) -> Any:
        return self._compared(">=", other)

    def __add__(self, other: Any) -> Any:
        return self._computed("+", other)

    def __radd__(self, other: Any) -> Any:
        return self._computed("+", other, left=True)

    def __sub__(self, other: Any) -> Any:
        return self._computed("-", other)

    def __rsub__(self, other: Any) -> Any:
        return self._computed("-", other, left=True)

    def __mul__(self, other: Any) -> Any:
        return self._computed("*", other)

    def __rmul__(self, other: Any) -> Any:
        return self._computed("*", other, left=True)

    def __floordiv__(self, other: Any) -> Any:
        return self._computed("//", other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._computed("//", other, left=True)

    def __mod__(self, other: Any) -> Any:
        return self._computed("%", other)

    def __rmod__(self, other: Any) -> Any:
        return self._computed("%", other, left=True)

    def __truediv__(self, other: Any) -> Any:
        return int(self) / (int(other) if isinstance(other, Step) else other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / int(self)

    def __pow__(self, other: Any) -> Any:
        return int(self) ** (int(other) if isinstance(other, Step) else other)

    def __rpow__(self, other: Any) -> Any:
        return other ** int(self)

    def __neg__(self) -> Any:
        return self._computed("-", 0, left=True)

    def __pos__(self) -> Step:
        return self

    def __abs__(self) -> int:
        return abs(int(self))

    def __bool__(self) -> bool:
        return bool(self._compared("!=", 0))

    def __int__(self) -> int:
        """Return the number itself, for which the plan is then made alone."""
        value = self.expression.of(self._now)
        self._compared("==", value)
        return value

    __index__ = __int__

    def __float__(self) -> float:
        return float(int(self))

    def __hash__(self) -> int:
        return hash(int(self))

    def __str__(self) -> str:
        return str(int(self))

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)


def _number(value: Any) -> Any:
    """Return an argument of torch's with numbers in the places of steps."""
    if isinstance(value, Step):
        return int(value)
    return type(value)(map(_number, value)) if type(value) in (tuple, list) else value
