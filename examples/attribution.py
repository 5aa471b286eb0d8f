"""Direct logit attribution: how much does each component add to the answer's logit?

    python examples/attribution.py --address localhost:9000

The residual stream is a sum: the embedding, and what each layer's attention and MLP added. With the final norm's scale
held fixed, the logits are a linear function of the stream. So each term has its own share of the difference between the two
likeliest tokens. The block runs norm and unembedding on vectors whose results give their weights and biases, so the kind of
norm does not matter. If the shares do not add up to the model's own difference, nothing is drawn. (Elhage et al., 2021)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import pictures

PROMPT = "When Mary and John went to the store, John gave a drink to"
EMBEDDING, BIASES = "embedding", "biases at the end"
AGREEMENT = 0.05  # of the logits' difference: what the shares may miss, as in half precision


@dataclass(frozen=True)
class Attribution:
    """The share of each component.

    Attributes:
        tokens: the likeliest token and the next.
        names: of the components: the embedding, attention and MLP of each layer, and biases of norm and unembedding if any.
        shares: [components], of the difference of the two tokens' logits.
        difference: of those logits, as the model computed them; the shares add up to it.
        prompt: what the model read.
    """

    tokens: tuple[int, int]
    names: list[str]
    shares: np.ndarray
    difference: float
    prompt: str = PROMPT


def run(model: Any, prompt: str = PROMPT) -> Attribution:
    """Attribute the last token's logits to the components of the model.

    Raises:
        NoExperiment: the shares do not add up, because what follows the last layer is not linear.
    """
    with model.trace(prompt, max_tokens=1, temperature=0.0):
        terms: Any = []
        for block in model.blocks:
            before = block.resid_pre[-1].float().clone()
            if not terms:
                terms.append(before)
            middle = block.resid_mid[-1].float().clone()
            terms.append(middle - before)
            after = block.resid_post[-1].float().clone()
            terms.append(after - middle)
        kind = model.blocks[-1].resid_post.dtype
        normed = model.final_norm.output[-1].float()

        # A norm that subtracts the mean gives its bias alone for equal numbers; another gives its weight.
        equal = torch_like(after, 1.0)
        swing = torch_like(after, 1.0)
        swing[1::2] = -1.0
        probes = stack([equal, -equal, swing, -swing]).to(kind)
        ones, minus, up, down = model.final_norm(probes).float()
        bias, weight = (ones + minus) / 2, (up - down) / 2 * swing
        centred = float((ones - minus).abs().max()) < 1e-3 * float(weight.abs().max())

        parts = stack(terms)
        if centred:
            parts = parts - parts.mean(-1, keepdim=True)
        parts = parts * weight
        total = parts.sum(0)
        scale = ((normed - bias) @ total) / (total @ total)
        nothing = torch_like(after, 0.0)
        alone = model.unembed(stack([*(parts * scale), bias, nothing]).to(kind)).float()
        logits = model.logits.output[0].float()
        first, second = logits.topk(2).indices.tolist()
        tokens = (first, second).save()
        difference = float(logits[first] - logits[second]).save()
        gaps = (alone[:, first] - alone[:, second]).save()
    *shares, of_bias, of_nothing = experiment.as_array(gaps)
    shares = [share - of_nothing for share in shares]
    names = [EMBEDDING, *(f"{part} {layer}" for layer in range(len(model.blocks)) for part in ("attention", "MLP"))]
    if of_bias or of_nothing:  # the unembedding of nothing is its own bias
        names.append(BIASES)
        shares.append(of_bias)
    if abs(sum(shares) - difference) > AGREEMENT * max(abs(difference), 1.0):
        raise experiment.NoExperiment(
            f"the components' shares add up to {sum(shares):.3f} and the logits differ by {difference:.3f}: what follows the "
            "last layer of this model is not a norm and a linear unembedding, so its logits cannot be split like this"
        )
    return Attribution(tokens, names, experiment.as_array(shares), difference, prompt)


def torch_like(vector: Any, value: float) -> Any:
    """Return a vector like another, of one number."""
    return vector * 0.0 + value


def stack(vectors: list[Any]) -> Any:
    """Return vectors as the rows of a matrix."""
    import torch

    return torch.stack(vectors)


def draw(model: Any, found: Attribution, picture: Path) -> None:
    """Write the shares as bars: two for each layer, and the embedding before them."""
    layers = sum(name.startswith("MLP") for name in found.names)
    parts = found.shares[1 : 1 + 2 * layers].reshape(layers, 2)
    first, second = experiment.labels_of(model, found.tokens)
    figure = pictures.figure(min(5.0 + 0.3 * layers, 11.0), 4.4)
    axis = figure.subplots()
    left = np.arange(layers)
    axis.bar(left - 0.2, parts[:, 0], 0.4, label="attention", color="tab:blue")
    axis.bar(left + 0.2, parts[:, 1], 0.4, label="MLP", color="tab:orange")
    axis.bar([-1.5], found.shares[:1], 0.6, color="tab:gray")
    at = pictures.every(layers, figure.get_figwidth() / (layers + 4), 0.3)
    ticks, labels = [-1.5, *at], [EMBEDDING, *map(str, at)]
    if found.names[-1] == BIASES:
        axis.bar([layers + 0.5], found.shares[-1:], 0.6, color="tab:gray")
        ticks, labels = [*ticks, layers + 0.5], [*labels, "biases"]
    axis.set_xticks(ticks, labels, fontsize=8)
    for label in axis.get_xticklabels():
        label.set_rotation(90 if label.get_text() in (EMBEDDING, "biases") else 0)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel("layer")
    axis.set_ylabel("share of the logit difference")
    axis.set_title(f"what says “{first}” rather than “{second}”", loc="left", fontsize=11)
    axis.legend(fontsize=8, loc="upper right")
    total = f"{found.shares.sum():.3f} in all; the model's own logits differ by {found.difference:.3f}."
    pictures.save(figure, f"Prompt: “{found.prompt}”. {total}", picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "attribution.png", {"prompt": PROMPT})
