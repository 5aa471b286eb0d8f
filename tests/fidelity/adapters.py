"""LoRA adapters of random weights, and the truth about each: the model that it was merged into."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# What each adapter changes, its rank and its alpha; the second leaves parts of the fused projections as they are.
ADAPTERS = {"everything": (EVERYTHING, 4, 8), "some": (("q_proj", "v_proj", "down_proj"), 3, 3)}


def write_adapter(checkpoint: Path, folder: Path, targets: tuple[str, ...], rank: int, alpha: int, seed: int) -> Path:
    """Write an adapter of random weights, as PEFT does, and beside it the model with these merged in; return that."""
    made = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weights = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in targets:
            down = torch.randn(rank, module.in_features, generator=made) * 0.1
            up = torch.randn(module.out_features, rank, generator=made) * 0.1
            weights[f"base_model.model.{path}.lora_A.weight"] = down
            weights[f"base_model.model.{path}.lora_B.weight"] = up
            module.weight.data += alpha / rank * up @ down
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(targets)}))
    model.save_pretrained(folder / "merged")
    return folder / "merged"
