"""Activation patching: in which layer, and at which token, is the answer decided?

    python examples/activation_patching.py --address localhost:9000

Two prompts have the same number of tokens and differ in a few tokens. While the model reads the second prompt, one activation
is replaced by the first prompt's: the residual stream after one layer, at one position. The share of the first prompt's answer
that comes back says how much of the difference lies there. The runs are invokes of one trace, or of a few traces if the model
has many layers. So the first prompt's activations never leave the engine. (Meng et al., 2022)
"""

from __future__ import annotations

from typing import Any

import experiment

from interpose import verbs

CLEAN = "The capital of Japan is"
CORRUPTED = "The capital of Italy is"


def run(model: Any, clean: str = CLEAN, corrupted: str = CORRUPTED) -> verbs.PatchSweep:
    """Patch every layer and position."""
    return verbs.patch_sweep(model, clean, corrupted)


if __name__ == "__main__":
    experiment.main(__doc__, run, "activation-patching.png", {"clean": CLEAN, "corrupted": CORRUPTED})
