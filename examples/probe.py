"""A linear probe: is a fact about a token written, linearly, in the residual stream?

    python examples/probe.py --address localhost:9000

10,000 activations of one layer are collected from random prompts, several prompts in each trace. A ridge regression learns to
tell from one activation whether its token is in the upper half of the vocabulary. Its accuracy is measured on other prompts.
(Alain & Bengio, 2016)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import pictures

DEPTH = 0.5  # of the layer that the probe reads; 1: after the last
PROMPTS, LENGTH = 50, 200
WORDS = 40  # that the prompts are made of; with many more than the stream is wide, no line tells them apart
PROMPTS_AT_ONCE = 10
TRAINING = 0.8
RIDGE = 1.0
PROMPT = "The"  # that tells how large the vocabulary is


@dataclass(frozen=True)
class Probe:
    """What the probe learned.

    Attributes:
        activations: [examples, hidden].
        labels: [examples], -1 or 1.
        scores: [examples], the probe's.
        accuracy: on the examples that it was not trained on.
        layer: after which the stream was read.
    """

    activations: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    accuracy: float
    layer: int


def prompts(vocab: int, special: set[int], length: int = LENGTH) -> np.ndarray:
    """Return random prompts without special tokens, int64 [prompts, length]."""
    random = np.random.default_rng(0)
    words = random.choice(np.setdiff1d(np.arange(vocab), sorted(special)), WORDS, replace=False)
    return random.choice(words, (PROMPTS, length))


def collect(model: Any, ids: np.ndarray, layer: int) -> np.ndarray:
    """Return the residual stream after the layer for every token, [prompts, length, hidden]."""
    collected = []
    for start in range(0, len(ids), PROMPTS_AT_ONCE):
        with model.trace(max_tokens=1) as tracer:
            streams = {}.save()
            for index, prompt in enumerate(ids[start : start + PROMPTS_AT_ONCE].tolist()):
                with tracer.invoke(prompt):
                    streams[index] = model.blocks[layer].resid_post.float().clone()
        collected += [experiment.as_array(streams[index]) for index in sorted(streams)]
    return np.stack(collected)


def train(activations: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the ridge regression's weights, [hidden + 1]; the last one is the bias."""
    inputs = np.c_[activations, np.ones(len(activations))]
    return np.linalg.solve(inputs.T @ inputs + RIDGE * np.eye(inputs.shape[1]), inputs.T @ labels)


def run(model: Any) -> Probe:
    """Collect, train, and score."""
    with model.trace(PROMPT, max_tokens=1):
        vocab = model.logits.output.shape[-1].save()
    layer, length = experiment.layer_at(model, DEPTH), min(LENGTH, model.max_model_len - 1)
    ids = prompts(vocab, experiment.special_ids(model), length)
    activations = collect(model, ids, layer).reshape(ids.size, -1)
    labels = np.where(ids.reshape(-1) < vocab // 2, -1.0, 1.0)
    cut = int(TRAINING * PROMPTS) * length
    weights = train(activations[:cut], labels[:cut])
    scores = np.c_[activations, np.ones(len(activations))] @ weights
    return Probe(activations, labels, scores, float((np.sign(scores[cut:]) == labels[cut:]).mean()), layer)


def draw(model: Any, found: Probe, picture: Path) -> None:
    """Write the scores of both classes as histograms."""
    figure = pictures.figure(7, 4)
    axis = figure.subplots()
    cut = int(TRAINING * len(found.labels))
    for label, name in ((-1.0, "lower half"), (1.0, "upper half")):
        axis.hist(found.scores[cut:][found.labels[cut:] == label], bins=40, alpha=0.6, label=name)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel("the probe's score")
    axis.set_ylabel("tokens")
    axis.set_title(
        f"which half of the vocabulary: {found.accuracy:.1%} right on prompts it has not seen", loc="left", fontsize=11
    )
    axis.legend()
    caption = f"{len(found.labels)} activations of the residual stream after layer {found.layer}."
    pictures.save(figure, caption, picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "probe.png")
