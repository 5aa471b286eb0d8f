"""What the experiments would find in a model of any size, made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from interpose import verbs

WORDS = ["The", " Eiffel", " Tower", " is", " in", " Paris", " transformers", "\\n", " $5", " Constantinople"]
HEADS = {4: 4, 30: 9, 80: 64}  # by the number of layers


def words(count: int) -> tuple[str, ...]:
    return tuple(WORDS[i % len(WORDS)] for i in range(count))


def found(kind: str, layers: int, tokens: int = 6, repeats: int = 1) -> Any:
    """What a verb would return for a model of so many layers, and prompts of so many tokens.

    Args:
        kind: the function of `interpose.plots` that draws it.
        layers: of the model.
        tokens: of each prompt.
        repeats: how many prompts, where the experiment takes several.
    """
    random = np.random.default_rng(layers)
    ids, said = list(range(tokens)), words(tokens)
    prompts, spelled = (ids,) * repeats, (said,) * repeats
    text = "a continuation that is long, with a $ in it, and longer than any line of the picture\n" * 3
    names = ("embedding", *(f"{part} {i}" for i in range(layers) for part in ("attention", "MLP")), "biases at the end")
    guesses = random.integers(0, len(WORDS), (layers, tokens))
    every = tuple(range(layers))
    makers: dict[str, Callable[[], Any]] = {
        "lens": lambda: verbs.Lens(
            ids, said, every, 5, " Paris", guesses, tuple(tuple(WORDS[i] for i in row) for row in guesses),
            random.uniform(0, 1, (layers, tokens)), np.geomspace(9000, 1, layers).round(), np.linspace(0, 0.8, layers) ** 3,
        ),
        "patch_sweep": lambda: verbs.PatchSweep(
            ids, [0, 1, 5, *ids[3:]], said, (*said[:2], " Rome", *said[3:]), (5, 6), (" Paris", " Rome"),
            random.uniform(-0.2, 1.1, (layers, tokens)),
        ),
        "attention": lambda: verbs.Attention(
            ids, said, every, random.dirichlet(np.ones(tokens), (layers, HEADS[layers], tokens))
        ),
        "attribution": lambda: verbs.Attribution(
            prompts, spelled, ((5, 6),) * repeats, ((" Paris", " $5"),) * repeats, names,
            random.normal(size=(repeats, 2 * layers + 2)), np.ones(repeats),
        ),
        "head_ablation": lambda: verbs.HeadAblation(
            prompts, spelled, (5,) * repeats, (" Paris",) * repeats, random.normal(size=(repeats, layers, HEADS[layers]))
        ),
        "probe": lambda: verbs.Probe(
            every[-1:] if repeats == 1 else every, ("lower", "upper"), np.zeros((1, 1000, 8)),
            np.sign(random.normal(size=1000)), np.zeros(1000), random.normal(size=(1 if repeats == 1 else layers, 1000)),
            random.uniform(0.5, 1, (1 if repeats == 1 else layers, 5)), np.zeros((1, 9)),
        ),
        "probe_scores": lambda: verbs.ProbeScores(
            (ids, ids[:3]), (said, said[:3]), (random.normal(size=tokens), random.normal(size=3)), 2
        ),
        "sae": lambda: verbs.SparseFeatures(
            ids, said, random.exponential(size=(tokens, 512)), 7, random.normal(size=500), 2, tuple(range(12)), words(12)
        ),
        "steer": lambda: verbs.Steering(
            prompts, spelled, np.zeros(8), 2, np.array(STRENGTHS), random.normal(size=(7, repeats, 500)),
            np.zeros((7, repeats)), ((text,) * repeats,) * 7, (1, 2, 3), words(3),
        ),
        "monitor": lambda: verbs.Monitoring(
            ids, said, list(range(32)), words(32), random.normal(size=32), random.exponential(size=32), np.arange(32),
            np.zeros(8), 2, 1.0, False,
        ),
    }  # fmt: skip
    return makers[kind]()


STRENGTHS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)
