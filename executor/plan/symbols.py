"""Numbers that a traced step takes out of tensors: a tensor of the program stands for each.

A float is float64 and an int is int64, so that comparisons and sums give what Python gives. Only what has Python's own result is
defined. Anything else fails, and the block runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_flatten

from executor.plan.record import DECIDE, Recorder
from executor.plan.refuse import Refused


class Symbol:
    """A Python value of a traced step that a tensor stands for.

    What is not defined here fails, because the value is no number of Python's.

    Args:
        tensor: a scalar of the program.
        recorder: records the step.
    """

    def __init__(self, tensor: torch.Tensor, recorder: Recorder) -> None:  # []
        self.tensor = tensor
        self.recorder = recorder

    def _refuse(self, *_: object) -> NoReturn:
        raise Refused(self.recorder.line(), "a number that was taken out of the tensors is used", DECIDE)

    __bool__ = __float__ = __int__ = __index__ = __str__ = __repr__ = __format__ = __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse a number of a tensor as an argument of torch's."""
        values, _ = tree_flatten((args, kwargs))
        next(value for value in values if isinstance(value, Symbol))._refuse()


class Truth(Symbol):
    """A bool that a tensor stands for."""


class Number(Symbol):
    """A float or an int that a tensor stands for: float64 or int64."""

    def _compared(self, sign: str, other: object) -> Truth:
        if isinstance(other, Number):
            if other.tensor.dtype != self.tensor.dtype:
                self._refuse()
            value: Any = other.tensor
        elif type(other) in (int, float):
            value = other
            if not self.tensor.is_floating_point() and (isinstance(other, float) or abs(other) >= 1 << 62):  # type: ignore[arg-type]
                self._refuse()  # torch would round one of them
            if self.tensor.is_floating_point() and isinstance(other, int) and abs(other) > 1 << 53:
                self._refuse()
        else:
            self._refuse()
        return Truth(getattr(torch, sign)(self.tensor, value), self.recorder)

    def _computed(self, function: Callable[[Any, Any], torch.Tensor], other: object, left: bool = False) -> Number:
        """Return a sum, difference or product, which has the bits that Python's has."""
        if not self.tensor.is_floating_point():
            self._refuse()  # Python's integers have no end
        value: Any
        if isinstance(other, Number) and other.tensor.is_floating_point():
            value = other.tensor
        elif type(other) is float or (type(other) is int and abs(other) <= 1 << 53):
            value = torch.full((), float(other), dtype=torch.float64, device=self.tensor.device)
        else:
            self._refuse()
        return Number(function(value, self.tensor) if left else function(self.tensor, value), self.recorder)

    def __lt__(self, other: object) -> Truth:
        return self._compared("lt", other)

    def __le__(self, other: object) -> Truth:
        return self._compared("le", other)

    def __gt__(self, other: object) -> Truth:
        return self._compared("gt", other)

    def __ge__(self, other: object) -> Truth:
        return self._compared("ge", other)

    def __eq__(self, other: object) -> Truth:  # type: ignore[override]
        return self._compared("eq", other)

    def __ne__(self, other: object) -> Truth:  # type: ignore[override]
        return self._compared("ne", other)

    def __add__(self, other: object) -> Number:
        return self._computed(torch.add, other)

    def __radd__(self, other: object) -> Number:
        if not other:  # Python's sum() begins with 0, and rounds in a way of its own
            self._refuse()
        return self._computed(torch.add, other, left=True)

    def __sub__(self, other: object) -> Number:
        return self._computed(torch.sub, other)

    def __rsub__(self, other: object) -> Number:
        return self._computed(torch.sub, other, left=True)

    def __mul__(self, other: object) -> Number:
        return self._computed(torch.mul, other)

    def __rmul__(self, other: object) -> Number:
        return self._computed(torch.mul, other, left=True)

    def __truediv__(self, other: object) -> Number:
        if type(other) not in (int, float) or not other:  # Python raises where it divides by zero
            self._refuse()
        return self._computed(torch.div, other)

    def __neg__(self) -> Number:
        return Number(-self.tensor, self.recorder) if self.tensor.is_floating_point() else self._refuse()

    def __pos__(self) -> Number:
        return self

    def __abs__(self) -> Number:
        return Number(self.tensor.abs(), self.recorder) if self.tensor.is_floating_point() else self._refuse()
