"""The canonical value for a name of another package, or why a model has none."""

from __future__ import annotations

from interpose.contract.errors import InvalidArgument
from interpose.modules.envoy import Envoy
from interpose.modules.tree import Node
from interpose.tracing.model import Model

# The part of a layer or of the model, and the names of the value, of which a model has one or takes the first.
Values = tuple[str, tuple[str, ...]]


def layers_of(model: Model, kind: str) -> list[Node]:
    """Return the nodes `model.blocks[i]`.

    Args:
        model: a served model.
        kind: what the other package calls its names.

    Raises:
        InvalidArgument: the model has no canonical values.
    """
    pseudo = model.tree.pseudo
    if "blocks" not in pseudo:
        raise InvalidArgument(f"{model.name} has no canonical values, so {kind} have no counterparts; see print(model)")
    return pseudo["blocks"].items


def counterpart(
    model: Model, name: str, layer: int | None, values: Values, only_with: tuple[str, str] = ("", "")
) -> tuple[Envoy, str] | str:
    """Return the node and the name of a canonical value; a str is why there is none.

    Args:
        model: a model with canonical values.
        name: the other package's name, as the reason has it.
        layer: the number of a layer that the model has; None for a value of the whole model.
        values: where the value is.
        only_with: another value of the part, without which there is none, and what the model lacks then.
    """
    part, names = values
    above = model.tree if layer is None else model.tree.pseudo["blocks"].items[layer]
    node = above.children.get(part) or above.pseudo.get(part) if part else above
    if node is None:
        return f"{name} has no counterpart in this model: it has no {part}"
    other, lacking = only_with
    if other and other not in node.values:
        return f"{name} has no counterpart in this model: {lacking}"
    for value in names:
        if value in node.values:
            return Envoy(node, model.tree), value
    reasons = [node.refused[value] for value in names if value in node.refused]
    return f"{name} has no counterpart in this model: {reasons[0] if reasons else 'it has no such value'}"
