"""What the examples would find in a model of any size, made up, and enough of a model to draw it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

WORDS = ["The", " Eiffel", " Tower", " is", " in", " Paris", " transformers", "\n", " $5", " Constantinople"]


def model(layers: int) -> Any:
    """A model with so many layers, whose tokens are words in turn."""

    def decode(ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(WORDS[int(i) % len(WORDS)] for i in ids)

    def encode(text: str) -> list[int]:
        return list(range(len(text.split())))

    return SimpleNamespace(blocks=[None] * layers, tokenizer=SimpleNamespace(decode=decode, encode=encode))


def found(example: Any, layers: int, tokens: int = 6) -> Any:
    """What an example's `run` would return for a model of so many layers and a prompt of so many tokens."""
    random = np.random.default_rng(layers)
    heads = {4: 4, 30: 9, 80: 64}[layers]
    ids = list(range(tokens))
    kinds: dict[str, Any] = {
        "activation_patching": lambda: example.Patching(
            ids, [0, 1, 5, *ids[3:]], (5, 6), random.uniform(-0.2, 1.1, (layers, tokens))
        ),
        "attention": lambda: example.Attention(ids, random.dirichlet(np.ones(tokens), (layers, heads, tokens))),
        "attribution": lambda: example.Attribution(
            (5, 6),
            [
                "embedding",
                *(f"{part} {i}" for i in range(layers) for part in ("attention", "MLP")),
                "biases at the end",
            ],
            random.normal(size=2 * layers + 2),
            1.0,
        ),
        "head_ablation": lambda: example.Ablation(5, random.normal(size=(layers, heads))),
        "logit_lens": lambda: lens(example, layers, tokens, random),
        "probe": lambda: example.Probe(
            np.zeros((1000, 8)), np.sign(random.normal(size=1000)), random.normal(size=1000), 0.9, layers // 2
        ),
        "sae": lambda: example.Features(
            ids, random.exponential(size=(tokens, 512)), 7, random.normal(size=500), layers // 2
        ),
        "steering": lambda: example.Steering(
            np.zeros(8),
            random.normal(size=(len(example.STRENGTHS), 500)),
            np.zeros(len(example.STRENGTHS)),
            ["a continuation that is long, with a $ in it, and longer than any line of the picture\n" * 3] * 7,
            layers // 2,
        ),
        "stream_monitor": lambda: example.Watch(
            np.zeros(8), list(range(32)), random.normal(size=32), random.exponential(size=32), [], 1.0, 20, layers // 2
        ),
    }
    return kinds[example.__name__]()


def lens(example: Any, layers: int, tokens: int, random: Any) -> Any:
    """A lens whose answer climbs."""
    return example.Lens(
        list(range(tokens)),
        5,
        random.integers(0, len(WORDS), (layers, tokens)),
        random.uniform(0, 1, (layers, tokens)),
        np.geomspace(9000, 1, layers).round(),
        np.linspace(0, 0.8, layers) ** 3,
    )
