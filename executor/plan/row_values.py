"""Which values of a model have a row for each token, as its description says it.

A value has if its shape begins with the tokens and its row comes from what the model has of that token alone. Attention patterns
have not, and values that are computed apart from the model's pass are left out. So are inputs and outputs of the engine's own
modules, of which the description does not say what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from executor.core.location import COMPUTED
from executor.model.tree import PSEUDO
from interpose.v1 import model_pb2 as pb

_APART = frozenset(map(str, COMPUTED)) | {"experts", "expert_weights"}


@dataclass(frozen=True, eq=False)
class RowValues:
    """The modules of a model and their values, by path.

    Attributes:
        children: the names of a module's children; "" is the model.
        rows: the values with a row for each token.
        refused: the values that the model does not have, which are refused wherever a block asks for them.
        weights: the parameters.
    """

    children: Mapping[str, frozenset[str]] = field(default_factory=dict)
    rows: Mapping[str, frozenset[str]] = field(default_factory=dict)
    refused: Mapping[str, frozenset[str]] = field(default_factory=dict)
    weights: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, description: pb.ModelDescription) -> RowValues:
        """Return the values of a described model."""
        if any(module.path in (*PSEUDO, "unembed") for module in description.modules):
            return cls()  # these names are another's
        children: dict[str, set[str]] = {"": set(PSEUDO)}
        rows, refused, weights = (dict[str, frozenset[str]]() for _ in range(3))
        for node in (*description.modules, *description.canonical):
            above, _, name = node.path.rpartition(".")
            children.setdefault(node.path, set())
            if node.path:
                children.setdefault(above, set()).add(name)
        for module in description.modules:
            weights[module.path] = frozenset(one.name for one in module.parameters)
        for node in description.canonical:
            values = [one for one in node.values if one.name not in _APART]
            rows[node.path] = frozenset(
                one.name for one in values if not one.refusal and one.shape.startswith("[tokens,")
            )
            refused[node.path] = frozenset(one.name for one in values if one.refusal)
        return cls({path: frozenset(names) for path, names in children.items()}, rows, refused, weights)

    def items(self, path: str) -> tuple[str, ...]:
        """Return the paths of the items of a list of modules, in their order; () if a module is no list."""
        numbers = sorted(int(name) for name in self.children.get(path, ()) if name.isdigit())
        return tuple(f"{path}.{number}" for number in numbers)
