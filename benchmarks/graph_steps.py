"""What blocks cost an engine as it is deployed: compiled, with CUDA graphs and asynchronous scheduling where there is a GPU.

On a GPU the model has the sizes of a 1B llama, random weights in bfloat16, and stock vLLM is measured with its graphs and
without; elsewhere it is a small one and both are eager. The ratio is to the stock engine as it is deployed, the control a
second one of those. Steps with a block run eager, so "stock eager" is what a block's own cost is to be compared with. As in
`benchmarks.plain_decode`, two processes of the same engine differ for as long as they live, so there are several of each.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.rounds import Child, Measured, alternate
from interpose.cli.demo_model import Shape, write_demo_model

ENGINES = 2  # of each kind, one after the other
PROMPT_TOKENS = 64
NAMES = {"stock": "stock", "control": "stock", "stock eager": "stock", "interpose": "interpose"}


@dataclass(frozen=True)
class Group:
    """Cases that are measured in the same rounds.

    Attributes:
        batch: requests at a time.
        rounds: with each of the engines, on a GPU.
        stock: the engines without blocks that are measured beside them.
        blocks: by the case's name, how many of the requests have a block, and which.
        warm_up: whether a round comes before those that count.
        plain_only: whether the time is that of the requests without a block, which go on while the others wait.
    """

    batch: int
    rounds: int
    stock: tuple[str, ...]
    blocks: dict[str, tuple[int, str]]
    warm_up: bool = True
    plain_only: bool = False


GROUPS = (
    Group(1, 16, ("stock", "control"), {"plain": (0, "")}),
    Group(32, 16, ("stock", "control"), {"plain": (0, "")}),
    Group(
        1,
        4,
        ("stock", "stock eager"),
        {
            "capture one layer, prompt": (1, "capture one layer, prompt"),
            "capture one layer": (1, "capture one layer, all steps"),
            "capture all layers": (1, "capture all layers, all steps"),
            "steer one layer": (1, "steer one layer, all steps"),
        },
    ),
    Group(
        32,
        4,
        ("stock", "stock eager"),
        {"31 plain beside 1 captured": (1, "capture one layer, all steps")},
        plain_only=True,
    ),
    Group(
        32,
        1,
        ("stock", "stock eager"),
        {
            "capture one layer of each": (32, "capture one layer, all steps"),
            "steer one layer of each": (32, "steer one layer, all steps"),
            "capture all layers of each": (32, "capture all layers, all steps"),
        },
        warm_up=False,
    ),
)
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
    measured: dict[tuple[int, str], Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        if gpu:
            LlamaConfig(**LARGE).save_pretrained(folder)
            options |= {"dtype": "bfloat16", "load_format": "dummy", "max_model_len": 1024, "enforce_eager": False}
            options |= {"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 4 << 30}
        else:
            write_demo_model(Path(folder), "llama", Shape(layers=8))
        for _ in range(ENGINES):
            children = {
                name: Child(
                    "benchmarks.engine_child",
                    kind,
                    folder,
                    json.dumps(options | ({"enforce_eager": True} if name == "stock eager" else {})),
                )
                for name, kind in NAMES.items()
            }
            try:
                for number, group in enumerate(GROUPS):
                    for one in _group(children, group, tokens, group.rounds if gpu else 1):
                        measured.setdefault((number, one.name), Measured(one.name, [])).seconds.extend(one.seconds)
                        print(f"  batch {group.batch}, {one.name}: {one.median / tokens * 1e3:.4g} ms/step", flush=True)
            finally:
                for child in children.values():
                    child.close()
    return _figures(measured, tokens)


def _group(children: dict[str, Child], group: Group, tokens: int, rounds: int) -> list[Measured]:
    request: dict[str, Any] = {"batch": group.batch, "prompt_tokens": PROMPT_TOKENS, "tokens": tokens}
    cases = [(name, children[name], request) for name in group.stock]
    cases += [
        (name, children["interpose"], {**request, "work": work, "traced": traced, "plain_only": group.plain_only})
        for name, (traced, work) in group.blocks.items()
    ]
    return alternate(cases, rounds, group.warm_up)


def _figures(measured: dict[tuple[int, str], Measured], tokens: int) -> dict[str, dict[str, float]]:
    """Return the table: of the stock engines, which are in several groups, what their first measured.

    What else runs on the host only ever adds time, so the fastest round is there beside the median.
    """
    results: dict[str, dict[str, float]] = {}
    for (number, name), one in measured.items():
        base = measured[number, "stock"]
        ratio = {} if one is base else one.over(base).figures()
        figures = {"ms/step": one.median / tokens * 1e3, "fastest": min(one.seconds) / tokens * 1e3, **ratio}
        results.setdefault(f"batch {GROUPS[number].batch}, {name}", figures)
    return results
