"""A logit lens: what would each layer predict if it were the last layer?

    python examples/logit_lens.py --address localhost:9000

The block applies the final norm and the unembedding to the residual stream after each layer. It saves the likeliest token at
each position with its probability. It also saves how the model's answer climbs: its rank and its probability after each layer,
at the last token. (nostalgebraist, 2020)
"""

from __future__ import annotations

from typing import Any

import experiment

from interpose import verbs

PROMPT = "The Eiffel Tower is in"


def run(model: Any, prompt: str = PROMPT) -> verbs.Lens:
    """Look through the lens at one prompt."""
    return verbs.logit_lens(model, prompt)


if __name__ == "__main__":
    experiment.main(__doc__, run, "logit-lens.png", {"prompt": PROMPT})
