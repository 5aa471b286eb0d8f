"""The models and the prompts that engines are measured on.

Of the large models only the sizes matter: their weights are random, made in the workers, and never on a disk. They use the
small model's tokenizer, because their text does not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interpose.cli.demo_model import Shape, write_demo_model

SMALL = Shape(layers=8, context=4096)
_TOKENS = 400  # token ids that prompts are made of; every vocabulary has more

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
# Of Llama 3.2 1B and Llama 3.1 8B: the configuration, and the part of a GPU's memory that one engine asks for.
_LARGE: dict[str, tuple[dict[str, Any], float]] = {
    "1b": (
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        0.15,
    ),
    "8b": (
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
        0.35,
    ),
}
SIZES = ("small", *_LARGE)
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number


@dataclass(frozen=True)
class Model:
    """The model of a benchmark: one of `SIZES`, in one of `DTYPES`, on GPUs or on the CPU."""

    size: str
    dtype: str
    gpu: bool

    @classmethod
    def chosen(cls, size: str | None, dtype: str | None) -> Model:
        """Return the model of this size and dtype; None chooses what suits the machine."""
        import torch

        gpu = torch.cuda.is_available()
        return cls(size or ("1b" if gpu else "small"), dtype or ("bfloat16" if gpu else "float32"), gpu)

    def layouts(self, given: Sequence[int] | None) -> list[int]:
        """Return the tensor-parallel sizes to measure.

        These are the given sizes, or 1 and 2, and 4 on GPUs, as far as there are any.

        Raises:
            ValueError: there are fewer GPUs than ranks.
        """
        if not self.gpu:
            return list(given or (1, 2))
        import torch

        gpus = torch.cuda.device_count()
        if given and max(given) > gpus:
            raise ValueError(f"{max(given)} ranks need as many GPUs, and there are {gpus}")
        return list(given or [size for size in (1, 2, 4) if size <= gpus])

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the model to `folder`; return the options of vLLM's engine that it runs with.

        On GPUs the engine compiles and replays CUDA graphs, as it is deployed; on the CPU it is eager.
        """
        options: dict[str, Any] = {"dtype": self.dtype, "max_model_len": SMALL.context, "enforce_eager": not self.gpu}
        if self.size == "small":
            write_demo_model(folder, "llama", SMALL)
            return {**options, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 256 << 20}
        from transformers import LlamaConfig

        sizes, memory = _LARGE[self.size]
        write_demo_model(folder, "llama", Shape(layers=1))
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        LlamaConfig(**_LLAMA, **sizes, dtype=self.dtype).save_pretrained(folder)
        options |= {"load_format": "dummy", "kv_cache_memory_bytes": 4 << 30}
        return {**options, "gpu_memory_utilization": memory}


def prompts(tokens: int) -> Iterator[list[int]]:
    """Yield prompts of this many token ids, at least four.

    Each prompt begins with other tokens, so no prompt is in a cache.
    """
    rest = [5 + 7 * index % _TOKENS for index in range(tokens - 4)]
    for number in itertools.count():
        yield [*(5 + number // _TOKENS**digit % _TOKENS for digit in range(4)), *rest]
