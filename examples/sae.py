"""A sparse autoencoder in the loop: encodes the stream, switches a feature off, and decodes.

    python examples/sae.py --address localhost:9000

The dictionary's weights travel to the engine with the block. There the residual stream after one layer is replaced by the
dictionary's reconstruction: once with all features, and once with the strongest feature switched off. The error of the
reconstruction is kept, so the difference comes from the feature alone. The weights here are random; an experiment loads trained
weights. (Bricken et al., 2023)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import pictures
import torch

PROMPT = "The river runs through the city, under the old bridges and"
DEPTH = 0.5  # of the layer whose stream the dictionary reads; 1: after the last
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
        layer: after which the stream was read.
    """

    ids: list[int]
    activations: np.ndarray
    strongest: int
    change: np.ndarray
    layer: int


def dictionary(width: int, features: int = FEATURES) -> tuple[Any, Any, Any, Any]:
    """Return a random dictionary, float32.

    Returns:
        The encoder [width, features] and its bias [features], the decoder [features, width] and its bias [width].
    """
    random = torch.Generator().manual_seed(0)
    decoder = torch.nn.functional.normalize(torch.randn(features, width, generator=random), dim=-1)
    return decoder.T.clone(), torch.full((features,), -0.5), decoder, torch.zeros(width)


def run(model: Any, prompt: str = PROMPT) -> Features:
    """Encode, switch the strongest feature off, decode, and compare the logits."""
    ids, layer = experiment.encode(model, prompt), experiment.layer_at(model, DEPTH)
    with model.trace(ids, max_tokens=1):
        width = model.blocks[layer].resid_post.shape[-1].save()
    encoder, encoder_bias, decoder, decoder_bias = dictionary(width)

    def encode(stream: Any) -> Any:
        return torch.relu((stream - decoder_bias) @ encoder + encoder_bias)

    def decode(features: Any) -> Any:
        return features @ decoder + decoder_bias

    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        with tracer.invoke(ids):
            stream = model.blocks[layer].resid_post
            activations = encode(stream.float()).save()
            error = stream.float() - decode(activations)
            stream[:] = decode(activations) + error
            intact = model.logits.output[0].float().save()
        with tracer.invoke(ids):
            stream = model.blocks[layer].resid_post
            features = encode(stream.float())
            error = stream.float() - decode(features)
            strongest = int(features[-1].argmax()).save()
            features[:, strongest] = 0
            stream[:] = decode(features) + error
            without = model.logits.output[0].float().save()
    change = experiment.as_array(without) - experiment.as_array(intact)
    return Features(ids, experiment.as_array(activations), strongest, change, layer)


def draw(model: Any, found: Features, picture: Path) -> None:
    """Write the most active features, and the logits that move without the strongest feature."""
    top = np.argsort(found.activations.max(0))[::-1][:SHOWN]
    cells = pictures.Cells.fit(len(top), len(found.ids), within=(7.0, 5.0), least=4.0)
    figure = pictures.figure(cells.size[0] + 5.6, 6.2)
    grid, bars = figure.subplots(1, 2, width_ratios=(cells.size[0] + 1.0, 3.0))
    rows, columns = [f"{feature}" for feature in top], experiment.labels_of(model, found.ids)
    table = found.activations.T[top]
    image = pictures.heat_map(grid, table, rows, columns, "most active features", cells=cells, diverging=False)
    figure.colorbar(image, ax=grid, label="activation")
    moved = np.argsort(np.abs(found.change))[::-1][:12][::-1]
    colours = ["tab:red" if found.change[token] > 0 else "tab:blue" for token in moved]
    bars.barh(range(len(moved)), found.change[moved], color=colours)
    bars.set_yticks(range(len(moved)), experiment.labels_of(model, moved), family="monospace")
    bars.set_title(f"logits without feature {found.strongest}", loc="left", fontsize=11)
    pictures.save(figure, f"The residual stream after layer {found.layer}, through a random dictionary.", picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "sae.png", {"prompt": PROMPT})
