"""A linear probe: is a fact about a token written, linearly, in the residual stream?

    python examples/probe.py --address localhost:9000

10,000 activations of one layer are collected from random prompts, several prompts in each trace. A ridge regression learns to
tell from one activation whether its token is in the upper half of the vocabulary. Its accuracy is measured on other prompts.
(Alain & Bengio, 2016)
"""

from __future__ import annotations

from typing import Any

import experiment
import numpy as np

from interpose import verbs

DEPTH = 0.5  # of the layer that the probe reads; 1: after the last
PROMPTS, LENGTH = 50, 200
WORDS = 40  # that the prompts are made of; with many more than the stream is wide, no line tells them apart
PROMPT = "The"  # that tells how large the vocabulary is
LOWER, UPPER = "lower half", "upper half"


def prompts(vocab: int, special: set[int], length: int = LENGTH) -> np.ndarray:
    """Return random prompts without special tokens, int64 [prompts, length]."""
    random = np.random.default_rng(0)
    words = random.choice(np.setdiff1d(np.arange(vocab), sorted(special)), WORDS, replace=False)
    return random.choice(words, (PROMPTS, length))


def run(model: Any) -> verbs.Probe:
    """Collect, train, and score."""
    with model.trace(PROMPT, max_tokens=1):
        vocab = model.logits.output.shape[-1].save()
    layer, length = verbs.layer_at(model, DEPTH), min(LENGTH, model.max_model_len - 1)
    ids = prompts(vocab, experiment.special_ids(model), length)
    labels = [[LOWER if token < vocab // 2 else UPPER for token in row] for row in ids]
    return verbs.probe(model, ids.tolist(), labels, layers=[layer])


if __name__ == "__main__":
    experiment.main(__doc__, run, "probe.png")
