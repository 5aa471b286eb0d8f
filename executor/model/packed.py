"""Weights that a layer has in a packed form, under other names."""

from __future__ import annotations

from executor.core.errors import Refusal
from executor.model.node import Node
from executor.model.parameters import not_given
from executor.model.remote_module import names_of
from interpose.contract.names import written

# Names of what stands for a weight, or beside it, in layers with quantised weights.
_PACKED = frozenset(("qweight", "scales", "weight_packed", "weight_scale", "weight_scale_inv"))


def why_packed(node: Node, name: str) -> Refusal | None:
    """Return the error for a weight that a layer has under other names; None if it has none."""
    if node.layer is None or name != "weight":
        return None
    packed = sorted(_PACKED & set(names_of(node.layer)))
    if not packed:
        return None
    return not_given(f"{written(node.path)}.{name}", f"the layer's weights are quantised ({', '.join(packed)})")
