"""Pictures of what `interpose.verbs` found, by matplotlib: `pip install 'interpose[plots]'`.

Each function takes a result and a path. A path ends in .png, .svg or .pdf; without a path nothing is written. The function
returns a figure of matplotlib, which a notebook shows. No window opens.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interpose.plots.curves import attribution, monitor, probe, sae, steer
    from interpose.plots.patterns import attention
    from interpose.plots.tables import head_ablation, lens, lenses, patch_sweep, probe_scores

# The module of each function. A module is imported when its name is first used, because matplotlib may be missing.
_HOMES = {
    "attention": "patterns",
    "attribution": "curves",
    "head_ablation": "tables",
    "lens": "tables",
    "lenses": "tables",
    "monitor": "curves",
    "patch_sweep": "tables",
    "probe": "curves",
    "probe_scores": "tables",
    "sae": "curves",
    "steer": "curves",
}

__all__ = [
    "attention",
    "attribution",
    "head_ablation",
    "lens",
    "lenses",
    "monitor",
    "patch_sweep",
    "probe",
    "probe_scores",
    "sae",
    "steer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'interpose.plots' has no attribute {name!r}")
    return getattr(importlib.import_module(f"interpose.plots.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
