"""A module of the served model as blocks see it: its path and its values.

A node has raw locations, whose values are the module's own arguments and results. It may have canonical values beside them
(`View`): each is a function of one raw location, with a way back where it can be written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch

from executor.core.errors import Refusal
from executor.core.location import COMPUTED
from executor.model.items import check
from executor.model.layouts import Layouts
from executor.model.lora import layer_of
from executor.model.rows import Rows
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb


class Computed(Protocol):
    """A value that the model never holds, computed for one request when its block asks for it."""

    @property
    def needs(self) -> Sequence[Node]:
        """Modules that run inside of the module.

        What such a module returned in the step is in its `kept`, if the block asked for the value before the module ran.
        """

    def compute(self, given: tuple[Any, Any], returned: Any, rows: Rows, index: int) -> torch.Tensor:  # [rows, ...]
        """Return the whole value; called on every tensor-parallel rank.

        Args:
            given: the module's `(args, kwargs)`.
            returned: what it returned.
            rows: the request's rows.
            index: the request's place in the batch.

        Raises:
            Refusal: it cannot be computed truthfully; the same on every rank.
        """


@dataclass
class Node:
    """One module: its path, its torch module, and its children by name.

    Attributes:
        computed: values that are computed from what the module is given and what it returns, by the kind of location.
        views: of a canonical node, the values that it has, by name.
        applies: of a canonical node, what is applied when a block calls it.
        title: of a canonical node, what it is called where a module has its class.
        adapted: whether what a block would apply here looks for the LoRA adapters of the batch's rows.
        stage: the first pipeline stage that has it.
        beside: modules whose results computed values need that a block may ask for after it has been at this one.
        kept: what it returned in this step, where a computed value needs it.
    """

    path: str
    module: torch.nn.Module | None
    layouts: Layouts
    children: dict[str, Node] = field(default_factory=dict)
    computed: dict[str, Computed] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    applies: Node | None = None
    title: str = ""
    adapted: bool = False
    stage: int = 0
    beside: Sequence[Node] = field(default=(), init=False, repr=False, compare=False)
    kept: Any = field(default=None, init=False)

    @property
    def layer(self) -> torch.nn.Module | None:
        """The model's own module: with LoRA adapters, `module` is what runs in its place."""
        return layer_of(self.module)


@dataclass(frozen=True, eq=False)
class View(ABC):
    """One canonical value.

    Attributes:
        name: what a block calls it, e.g. "blocks[2].attn.z".
        owner: the path of the canonical node that has it, e.g. "blocks.2.attn".
        node: the raw module.
        kind: which of its locations.
        shape: as the documentation gives it, e.g. "[tokens, 4, 32]".
    """

    name: str
    owner: str
    node: Node
    kind: str
    shape: str

    @property
    def counts_tokens(self) -> bool:
        """Whether the value has a row for each token, from what the model has of that token alone."""
        return self.shape.startswith("[tokens,") and self.kind not in COMPUTED

    @abstractmethod
    def read(self, served: Served) -> torch.Tensor:  # [rows, ...]
        """Return the value from what the block is served at the raw location."""

    def write(self, served: Served, value: Any) -> None:
        """Replace the value.

        The new value goes into the served tensor in place: where the model holds that tensor under another name, as the
        residual connection of a block holds the input of its norms, both see it.

        Raises:
            Refusal: the value does not fit.
        """
        current = self.read(served)
        check(current, value, self.name)
        if value is not current:
            with torch.no_grad():
                current.copy_(value.detach())

    def read_only(self, instead: str) -> Refusal:
        """The error for a write that the model could not go on with."""
        return Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT,
            f"{self.name} is computed for the block, the model never holds it, so it cannot be changed; {instead}",
            location=self.name,
        )


@dataclass(frozen=True, eq=False)
class Unreachable(View):
    """A value that this architecture does not have, or that cannot be given truthfully.

    Attributes:
        why: the reason, and what to use instead.
    """

    why: str = ""

    def read(self, served: Served) -> NoReturn:
        raise self.refusal()

    def refusal(self) -> Refusal:
        """The error for using it."""
        return Refusal(pb.ERROR_CODE_UNKNOWN_LOCATION, f"{self.name} cannot be given: {self.why}", location=self.name)
