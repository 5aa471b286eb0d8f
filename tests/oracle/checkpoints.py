"""Small random checkpoints on which a wrong value shows: the demo models, in sizes where nothing is a lucky fit.

The vocabulary is not a multiple of what vLLM pads to; llama and qwen3 have fewer key/value heads than query heads, so
that a wrong split of `qkv_proj` shows; all heads of qwen3 together are wider than its hidden size, and its embeddings
are tied.
"""

from __future__ import annotations

from pathlib import Path

from interpose.cli.demo_model import Shape, write_demo_model

LAYERS = 3
SHAPES = {
    "llama": Shape(layers=LAYERS, hidden=128, context=256),
    "gpt2": Shape(layers=LAYERS, hidden=128, context=256),
    "qwen3": Shape(layers=LAYERS, hidden=96, context=256),
}
ARCHITECTURES = tuple(SHAPES)


def make_checkpoint(path: Path, arch: str, seed: int = 0) -> Path:
    """Write a random float32 checkpoint with its tokenizer and return its directory.

    Args:
        path: the directory to write to.
        arch: one of `ARCHITECTURES`.
        seed: of the weights.
    """
    return write_demo_model(path, arch, SHAPES[arch], seed)
