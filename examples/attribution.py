"""Direct logit attribution: how much does each component add to the answer's logit?

    python examples/attribution.py --address localhost:9000

The residual stream is a sum: the embedding, and what each layer's attention and MLP added. With the final norm's scale
held fixed, the logits are a linear function of the stream. So each term has its own share of the difference between the two
likeliest tokens. The block runs norm and unembedding on vectors whose results give their weights and biases, so the kind of
norm does not matter. If the shares do not add up to the model's own difference, nothing is drawn. (Elhage et al., 2021)
"""

from __future__ import annotations

from typing import Any

import experiment

from interpose import verbs

PROMPT = "When Mary and John went to the store, John gave a drink to"


def run(model: Any, prompt: str = PROMPT) -> verbs.Attribution:
    """Attribute the last token's logits to the components of the model."""
    return verbs.attribution(model, prompt)


if __name__ == "__main__":
    experiment.main(__doc__, run, "attribution.png", {"prompt": PROMPT})
