"""Which values of a model have a row for each token, as its description says it.

A canonical value has if its shape begins with the tokens and its row comes from what the model has of that token alone. Attention
patterns have not, and values that are computed apart from the model's pass are left out. What the inputs and outputs of the
engine's own modules hold is said by the workers, which have seen them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from executor.core.location import COMPUTED, Kind
from executor.model.tree import PSEUDO
from executor.plan.forms import Form, Group, Leaf
from interpose.v1 import model_pb2 as pb

ROWS, OTHER = "r", "-"  # a tensor with a row for each token, and anything else
_APART = frozenset(map(str, COMPUTED)) | {"experts", "expert_weights"}


@dataclass(frozen=True, eq=False)
class RowValues:
    """The modules of a model and their values, by path.

    Attributes:
        children: the names of a module's children; "" is the model.
        rows: the values with a row for each token.
        refused: the values that the model does not have, which are refused wherever a block asks for them.
        weights: the parameters.
        forms: of the engine's own modules, what an output or a first argument holds, by path and kind with a point between, as of
            `forms_of_rows`.
    """

    children: Mapping[str, frozenset[str]] = field(default_factory=dict)
    rows: Mapping[str, frozenset[str]] = field(default_factory=dict)
    refused: Mapping[str, frozenset[str]] = field(default_factory=dict)
    weights: Mapping[str, frozenset[str]] = field(default_factory=dict)
    forms: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, description: pb.ModelDescription, forms: Mapping[str, str]) -> RowValues:
        """Return the values of a described model.

        Args:
            description: the model's.
            forms: as of the attribute.
        """
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
        return cls({path: frozenset(names) for path, names in children.items()}, rows, refused, weights, forms)

    def items(self, path: str) -> tuple[str, ...]:
        """Return the paths of a list's modules, in their order; () if a module is no list."""
        numbers = sorted(int(name) for name in self.children.get(path, ()) if name.isdigit())
        return tuple(f"{path}.{number}" for number in numbers)


def forms_of_rows(forms: Mapping[tuple[str, str], Form]) -> dict[str, str]:
    """Return what outputs and first arguments of modules hold.

    Args:
        forms: of the values for one row, by path and kind.

    Returns:
        By path and kind with a point between, `ROWS`, or in brackets `ROWS` or `OTHER` for each item of a tuple or list. Where
        nothing has rows, there is no entry.
    """
    found = {}
    for (path, kind), form in forms.items():
        if path in PSEUDO or kind not in (Kind.INPUT, Kind.OUTPUT):
            continue
        held = form.tree
        if kind == Kind.INPUT:
            args, kwargs = held.items
            held = next(iter((*args.items, *kwargs.items)), None)
        if isinstance(held, Group) and held.kind is not dict:
            told = f"({''.join(ROWS if isinstance(one, Leaf) else OTHER for one in held.items)})"
        else:
            told = ROWS if isinstance(held, Leaf) else OTHER
        if ROWS in told:
            found[f"{path}.{kind}"] = told
    return found
