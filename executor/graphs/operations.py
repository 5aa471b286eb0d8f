"""What a tap does to a request's rows at a site, and how each operation rounds.

The site's tensor has the dtype D of the model (bfloat16, float16 or float32). A row enters as numbers of D, or as the sum of a
residual pair: both added in float32, the sum rounded to D, as torch adds two tensors. The taps of a request at a site run one
after the other. Each operation computes in float32 and rounds its result to D once.

So the elementwise operations give the same bits as torch's own, on CPUs and on CUDA:

| operation | a block's code | result |
| --- | --- | --- |
| READ | `x.save()`, `found.append(x)` | the columns as they are at this point |
| ADD | `x += v`, `x += 2.5` | round(x + v) |
| MULTIPLY | `x *= v`, `x *= 0.5` | round(x * v) |
| SET | `x[:] = v`, `x[:] = 0` | v |
| CLAMP | `x.clamp_(low, high)` | x between the bounds; NaN stays NaN |

A vector in float32 is used as it is, and the result rounded to D, as torch does for `x += v` and for `x[:] = x.float() * v`.
A number beside a tensor is used in float32, as torch does; on a CPU, a number that is added is rounded to D first, as torch does.
Subtraction of v is addition of -v, with the same bits. Some operations of torch are not among them, because their bits depend on
the device or on the kernel: division (on CUDA torch multiplies by the inverse), `torch.add(x, v, alpha=a)` (one rounding or two),
bounds of zero (torch's zero may lose its sign), and every sum over a row (products, norms, projections).

FORM is the operation with sums: `x + (c0 + c1 |x| + c2 (x·u) + c3 (clamp(x·u, low, high) - x·u)) w`, over the tap's columns, in
float32 with one rounding at the end. The order of its sums is not fixed, so its result agrees with torch code within the rounding
of a float32 sum, not to the bit. It is for operations that are declared as such (steering, ablation, caps, swaps), whose
definition this is. A block's own torch code never becomes a FORM.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

# The row after the last, where a tap has no end.
ALL = 2**31 - 1


class Code(enum.IntEnum):
    """The operations, by their number in the tables."""

    READ = 0
    ADD = 1
    MULTIPLY = 2
    SET = 3
    CLAMP = 4
    FORM = 5


class Refused(ValueError):
    """A tap cannot be in the tables; the text says why."""


@dataclass(frozen=True, eq=False)
class Tap:
    """One operation on a request's rows at a site.

    Size: each field is a column of the tables.

    Attributes:
        site: the number of the site.
        code: the operation.
        columns: the first column and the column after the last. A request sees a canonical view as columns of a site.
        rows: the first row and the row after the last, counted from the first row of the request in the step.
        steps: the first step and the step after the last in which the tap is open.
        vector: the operand of ADD, MULTIPLY and SET, or w of FORM: [columns] for all rows, or [rows, columns] for a row each. An
            operand has the dtype D, or is float32.
        number: the operand, if there is no vector.
        direction: u of FORM, [columns].
        coefficients: c0, c1, c2, c3 of FORM.
        low, high: the bounds of CLAMP, and of the clamp in FORM.
    """

    site: int
    code: Code
    columns: tuple[int, int]
    rows: tuple[int, int] = (0, ALL)
    steps: tuple[int, int] = (0, ALL)
    vector: torch.Tensor | None = None
    number: float = 0.0
    direction: torch.Tensor | None = None
    coefficients: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    low: float = -math.inf
    high: float = math.inf

    @property
    def exact(self) -> bool:
        """Whether the result has the bits of torch's own operation."""
        return self.code is not Code.FORM

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    def check(self, width: int) -> None:
        """Check the tap against the width of its site.

        Raises:
            Refused: columns, rows, steps or operands do not fit.
        """
        first, after = self.columns
        if not 0 <= first < after <= width:
            raise Refused(f"columns {first}:{after} of a site with {width}")
        for what, (begin, end) in (("rows", self.rows), ("steps", self.steps)):
            if not 0 <= begin < end <= ALL:
                raise Refused(f"{what} {begin}:{end} are none")
        if self.vector is not None:
            if self.code in (Code.READ, Code.CLAMP):
                raise Refused(f"{self.code.name} takes no vector")
            rows = self.rows[1] - self.rows[0]
            if self.vector.shape not in ((self.width,), (rows, self.width)):
                raise Refused(f"a vector of shape {list(self.vector.shape)} for {rows} rows of {self.width} columns")
        if self.code is Code.FORM:
            if self.vector is None or self.vector.dim() != 1:
                raise Refused("FORM needs a vector [columns]")
            needs = any(self.coefficients[2:])
            if needs and (self.direction is None or self.direction.shape != (self.width,)):
                raise Refused("FORM with a product needs a direction [columns]")
        elif self.direction is not None:
            raise Refused(f"{self.code.name} takes no direction")
        if not self.low <= self.high:
            raise Refused(f"the bounds {self.low} and {self.high} are none")


def steer(site: int, vector: torch.Tensor, columns: tuple[int, int]) -> Tap:  # [columns]
    """Return a tap that adds a vector, to the bit as `x += vector`."""
    return Tap(site, Code.ADD, columns, vector=vector)


def steer_by_norm(site: int, vector: torch.Tensor, columns: tuple[int, int], factor: float) -> Tap:  # [columns]
    """Return a tap that adds `factor * |x| * vector`."""
    return Tap(site, Code.FORM, columns, vector=vector, coefficients=(0.0, factor, 0.0, 0.0))


def ablate(site: int, direction: torch.Tensor, columns: tuple[int, int]) -> Tap:  # [columns]
    """Return a tap that takes a direction of length 1 out of the rows."""
    return Tap(site, Code.FORM, columns, vector=direction, direction=direction, coefficients=(0.0, 0.0, -1.0, 0.0))


def cap(site: int, direction: torch.Tensor, columns: tuple[int, int], low: float, high: float) -> Tap:  # [columns]
    """Return a tap that keeps the part along a direction of length 1 between bounds."""
    part = (0.0, 0.0, 0.0, 1.0)
    return Tap(site, Code.FORM, columns, vector=direction, direction=direction, coefficients=part, low=low, high=high)


def swap(site: int, one: torch.Tensor, other: torch.Tensor, columns: tuple[int, int]) -> Tap:  # [columns]
    """Return a tap that exchanges the parts along two directions of length 1 at right angles."""
    between = one.float() - other.float()
    return Tap(site, Code.FORM, columns, vector=-between, direction=between, coefficients=(0.0, 0.0, 1.0, 0.0))
