"""A sparse autoencoder in the loop: encodes the stream, switches a feature off, and decodes.

    python examples/sae.py --address localhost:9000

The dictionary's weights travel to the engine with the block. There the residual stream after one layer is replaced by the
dictionary's reconstruction: once with all features, and once with the strongest feature switched off. The error of the
reconstruction is kept, so the difference comes from the feature alone. The weights here are random; an experiment loads trained
weights. (Bricken et al., 2023)
"""

from __future__ import annotations

from typing import Any

import experiment
import numpy as np

from interpose import verbs

PROMPT = "The river runs through the city, under the old bridges and"
DEPTH = 0.5  # of the layer whose stream the dictionary reads; 1: after the last
FEATURES = 512


def dictionary(width: int, features: int = FEATURES) -> dict[str, np.ndarray]:
    """Return a random dictionary, float32.

    Returns:
        The encoder [width, features] and its bias [features], the decoder [features, width] and its bias [width].
    """
    decoder = np.random.default_rng(0).normal(size=(features, width)).astype(np.float32)
    decoder /= np.linalg.norm(decoder, axis=-1, keepdims=True)
    biases = {"b_enc": np.full(features, -0.5, np.float32), "b_dec": np.zeros(width, np.float32)}
    return {"W_enc": decoder.T.copy(), "W_dec": decoder, **biases}


def run(model: Any, prompt: str = PROMPT) -> verbs.SparseFeatures:
    """Encode, switch the strongest feature off, decode, and compare the logits."""
    layer = verbs.layer_at(model, DEPTH)
    with model.trace(prompt, max_tokens=1):
        width = model.blocks[layer].resid_post.shape[-1].save()
    return verbs.sae(model, prompt, dictionary(width), layer=layer)


if __name__ == "__main__":
    experiment.main(__doc__, run, "sae.png", {"prompt": PROMPT})
