"""The places in a generation that a block can wait for."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Kind(enum.StrEnum):
    """The kinds of places that a block can wait for."""

    INPUT = "input"
    OUTPUT = "output"
    PATTERN = "pattern"
    EXPERT_ACT = "expert_act"
    EXPERT_OUT = "expert_out"
    STEP = "step"
    RESULT = "result"
    BARRIER = "barrier"


_EXPERTS = (
    "what the experts are given (the MLP's input, mlp.router_logits) or what they return together (the MLP's output)"
)
# Values that the model never holds, computed for one request just before a module's output, and what a block may change instead.
COMPUTED = {
    Kind.PATTERN: "what it is computed from (attn.q, attn.k) or what is computed with it (attn.z)",
    Kind.EXPERT_ACT: _EXPERTS,
    Kind.EXPERT_OUT: _EXPERTS,
}


@dataclass(frozen=True)
class Location:
    """A place in the generation that a block can wait for.

    The place is a module's input or output in one step, the beginning of a step, or the result.

    Attributes:
        shown: the canonical name under which the block asked for the location, or "".
    """

    path: str
    kind: str
    step: int
    shown: str = field(default="", compare=False)

    def __str__(self) -> str:
        name = self.shown or f"{self.path}.{self.kind}"
        return name + (f" (step {self.step})" if self.step else "")
