"""A sparse autoencoder in the loop: encode the residual stream to features, switch one off, decode. (Bricken et al., 2023)

    python examples/sae.py --address localhost:9000

The dictionary's weights travel to the engine with the block. There the stream after one layer is replaced by the
dictionary's reconstruction, whole and with its strongest feature switched off; what it cannot reconstruct is kept, so
that the difference is the feature's alone. The weights here are random, where an experiment loads trained ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import matplotlib.pyplot as plt
import numpy as np
import torch

PROMPT = "The river runs through the city, under the old bridges and"
LAYER = 2
FEATURES = 512
SHOWN = 24


@dataclass(frozen=True)
class Features:
    """What the dictionary says.

    Attributes:
        ids: the prompt's tokens.
        activations: [tokens, features], none below zero.
        strongest: the feature that is most active at the last token.
        change: [vocab], of the next token's logits without that feature.
    """

    ids: list[int]
    activations: np.ndarray
    strongest: int
    change: np.ndarray


def dictionary(width: int, features: int = FEATURES) -> tuple[Any, Any, Any, Any]:
    """Return a random dictionary: encoder [width, features] and bias, decoder [features, width] and bias."""
    random = torch.Generator().manual_seed(0)
    decoder = torch.nn.functional.normalize(torch.randn(features, width, generator=random), dim=-1)
    return decoder.T.clone(), torch.full((features,), -0.5), decoder, torch.zeros(width)


def run(model: Any) -> Features:
    """Encode, switch the strongest feature off, decode, and compare the logits."""
    ids = model.tokenizer.encode(PROMPT)
    encoder, encoder_bias, decoder, decoder_bias = dictionary(model.config["hidden_size"])

    def encode(stream: Any) -> Any:
        return torch.relu((stream - decoder_bias) @ encoder + encoder_bias)

    def decode(features: Any) -> Any:
        return features @ decoder + decoder_bias

    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        with tracer.invoke(ids):
            stream = model.blocks[LAYER].resid_post
            activations = encode(stream).save()
            error = stream - decode(activations)
            stream[:] = decode(activations) + error
            whole = model.logits.output[0].save()
        with tracer.invoke(ids):
            stream = model.blocks[LAYER].resid_post
            features = encode(stream)
            error = stream - decode(features)
            strongest = int(features[-1].argmax()).save()
            features[:, strongest] = 0
            stream[:] = decode(features) + error
            without = model.logits.output[0].save()
    change = experiment.as_array(without) - experiment.as_array(whole)
    return Features(ids, experiment.as_array(activations), strongest, change)


def draw(model: Any, found: Features, picture: Path) -> None:
    """Write the most active features over the prompt, and the logits that move without the strongest."""
    top = np.argsort(found.activations.max(0))[::-1][:SHOWN]
    figure, (grid, bars) = plt.subplots(1, 2, figsize=(13, 5.5), width_ratios=(1.6, 1))
    rows, columns = [f"{feature}" for feature in top], experiment.tokens_of(model, found.ids)
    image = experiment.heat_map(grid, found.activations.T[top], rows, columns, "most active features", diverging=False)
    figure.colorbar(image, ax=grid, label="activation")
    moved = np.argsort(np.abs(found.change))[::-1][:12][::-1]
    colours = ["tab:red" if found.change[token] > 0 else "tab:blue" for token in moved]
    bars.barh(experiment.tokens_of(model, [int(token) for token in moved]), found.change[moved], color=colours)
    bars.set_title(f"logits without feature {found.strongest}", loc="left", fontsize=11)
    bars.tick_params(axis="y", labelfontfamily="monospace")
    figure.subplots_adjust(bottom=0.2, left=0.05, right=0.98)
    experiment.save(figure, f"The residual stream after layer {LAYER}, through a random dictionary.", picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "sae.png")
