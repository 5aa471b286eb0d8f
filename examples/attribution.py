"""Direct logit attribution: how much does each component add to the answer's logit by itself? (Elhage et al., 2021)

    python examples/attribution.py --address localhost:9000

The residual stream is a sum: the embedding, and what each layer's attention and MLP added. With the final norm's scale
held fixed, the logits are a linear function of it, so each term has its own share of the difference between the two
likeliest tokens. The scale is read off the norm's own input and output; the unembedding is applied in the engine.
For models whose final norm is an RMS norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import numpy as np

PROMPT = "When Mary and John went to the store, John gave a drink to"


@dataclass(frozen=True)
class Attribution:
    """Who said it.

    Attributes:
        tokens: the likeliest token and the next.
        names: of the components.
        shares: [components], of the difference of the two tokens' logits.
        difference: of those logits, as the model computed them; the shares add up to it.
    """

    tokens: tuple[int, int]
    names: list[str]
    shares: np.ndarray
    difference: float


def run(model: Any) -> Attribution:
    """Attribute the last token's logits to the components of the model."""
    with model.trace(PROMPT, max_tokens=1, temperature=0.0):
        terms = {}
        for index, block in enumerate(model.blocks):
            before = block.resid_pre[-1].clone()
            if index == 0:
                terms["embedding"] = before
            middle = block.resid_mid[-1].clone()
            terms[f"attention {index}"] = middle - before
            after = block.resid_post[-1].clone()
            terms[f"MLP {index}"] = after - middle
        scale = model.final_norm.output[-1] / after
        first, second = model.logits.output[0].topk(2).indices.tolist()
        logits = model.logits.output[0]
        difference = float(logits[first] - logits[second]).save()
        tokens = (first, second).save()
        shares = {}.save()
        for name, term in terms.items():
            alone = model.unembed((term * scale)[None])[0]
            shares[name] = float(alone[first] - alone[second])
    return Attribution(tokens, list(shares), experiment.as_array(list(shares.values())), difference)


def draw(model: Any, found: Attribution, picture: Path) -> None:
    """Write the shares as bars."""
    first, second = experiment.tokens_of(model, found.tokens)
    figure, axis = plt.subplots(figsize=(2.5 + 0.8 * len(found.names), 4))
    colours = ["tab:red" if share > 0 else "tab:blue" for share in found.shares]
    axis.bar(found.names, found.shares, color=colours)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.tick_params(axis="x", rotation=35)
    axis.set_ylabel("logit difference")
    axis.set_title(f"who says “{first}” rather than “{second}”", loc="left", fontsize=11)
    figure.subplots_adjust(bottom=0.28, left=0.1, right=0.98)
    total = f"{found.shares.sum():.3f} in all; the model's own logits differ by {found.difference:.3f}."
    experiment.save(figure, f"Prompt: “{PROMPT}”. {total}", picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "attribution.png")
