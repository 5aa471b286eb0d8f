"""Head ablation: how much of the answer does each attention head carry?

    python examples/head_ablation.py --address localhost:9000

There is one invoke for each head and one trace for each layer. An invoke sets the head's values to zero before the output
projection. The log probability of the answer is compared with that of a run without ablation. (Michel et al., 2019)
"""

from __future__ import annotations

from typing import Any

import experiment

from interpose import verbs

PROMPT = "The quick brown fox jumps over the lazy"


def run(model: Any, prompt: str = PROMPT) -> verbs.HeadAblation:
    """Ablate every head of every layer, one at a time."""
    return verbs.head_ablation(model, prompt)


if __name__ == "__main__":
    experiment.main(__doc__, run, "head-ablation.png", {"prompt": PROMPT})
