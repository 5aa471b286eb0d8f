"""What blocks cost an engine as it is deployed: compiled, with CUDA graphs and asynchronous scheduling where there is a GPU.

On a GPU the model has the sizes of a 1B llama, random weights in bfloat16, and stock vLLM is measured with its graphs and
without; elsewhere it is a small one and both are eager. The ratio is to the stock engine as it is deployed, the control a
second one of those. Steps with a block run eager, so "stock eager" is what a block's own cost is to be compared with.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.rounds import Child, alternate
from interpose.cli.demo_model import Shape, write_demo_model

# Batch, rounds, and by the case's name how many of the requests have a block, and which.
CASES: list[tuple[int, int, dict[str, tuple[int, str]]]] = [
    (
        1,
        8,
        {
            "plain": (0, ""),
            "capture one layer, prompt": (1, "capture one layer, prompt"),
            "capture one layer": (1, "capture one layer, all steps"),
            "capture all layers": (1, "capture all layers, all steps"),
            "steer one layer": (1, "steer one layer, all steps"),
        },
    ),
    (32, 8, {"plain": (0, ""), "31 plain beside 1 captured": (1, "capture one layer, all steps")}),
    (
        32,
        2,
        {
            "capture one layer of each": (32, "capture one layer, all steps"),
            "steer one layer of each": (32, "steer one layer, all steps"),
            "capture all layers of each": (32, "capture all layers, all steps"),
        },
    ),
]
PROMPT_TOKENS = 64
# Of Llama 3.2 1B.
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def run() -> dict[str, dict[str, float]]:
    """Return ms/step of each case, prompt included, and its ratio to stock vLLM as it is deployed."""
    gpu = torch.cuda.is_available()
    tokens = 128 if gpu else 8
    options: dict[str, Any] = {"async_scheduling": None, "skip_tokenizer_init": True, "disable_log_stats": True}
    with tempfile.TemporaryDirectory() as folder:
        if gpu:
            LlamaConfig(**LARGE).save_pretrained(folder)
            options |= {"dtype": "bfloat16", "load_format": "dummy", "max_model_len": 1024, "enforce_eager": False}
            options |= {"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 4 << 30}
        else:
            write_demo_model(Path(folder), "llama", Shape(layers=8))
        eager = options | {"enforce_eager": True}
        engines = {
            "stock": ("stock", options),
            "control": ("stock", options),
            "stock eager": ("stock", eager),
            "interpose": ("interpose", options),
        }
        children = {
            name: Child("benchmarks.engine_child", kind, folder, json.dumps(given))
            for name, (kind, given) in engines.items()
        }
        try:
            results: dict[str, dict[str, float]] = {}
            for batch, rounds, blocks in CASES:
                request: dict[str, Any] = {"batch": batch, "prompt_tokens": PROMPT_TOKENS, "tokens": tokens}
                cases = [(name, children[name], request) for name in ("stock", "control", "stock eager")]
                cases += [
                    (name, children["interpose"], {**request, "work": work, "traced": traced})
                    for name, (traced, work) in blocks.items()
                ]
                base, *others = alternate(cases, rounds if gpu else 2)
                part = {f"batch {batch}, stock": {"ms/step": base.median / tokens * 1e3}}
                for other in others:
                    figures = {"ms/step": other.median / tokens * 1e3, **other.over(base).figures()}
                    part[f"batch {batch}, {other.name}"] = figures
                print(json.dumps(part), flush=True)
                results |= {name: figures for name, figures in part.items() if name not in results}
            return results
        finally:
            for child in children.values():
                child.close()
