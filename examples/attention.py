"""Attention patterns: which tokens does each head look at?

    python examples/attention.py --address localhost:9000

The engine's attention kernels keep no probabilities. The pattern is recomputed from the layer's own queries and keys
where a block asks for it, and only there. The picture shows at most 8 layers and 12 heads of each, evenly spread.
"""

from __future__ import annotations

from typing import Any

import experiment

from interpose import verbs

PROMPT = "The quick brown fox jumps"


def run(model: Any, prompt: str = PROMPT) -> verbs.Attention:
    """Read the pattern of every layer."""
    return verbs.attention(model, prompt)


if __name__ == "__main__":
    experiment.main(__doc__, run, "attention.png", {"prompt": PROMPT})
