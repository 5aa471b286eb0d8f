"""Measures an engine with LoRA adapters: each request is compared with transformers on weights that its adapter was merged into.

`python -m tests.fidelity.lora RESULT FOLDER ARCHITECTURE…` is one rank of several, as of `tests.fidelity.measure`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest

from executor.adapters import Adapters
from executor.options import prepare_environment
from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.fidelity.measure import BESIDE, PROMPTS, STEPS, Cells, Measurement
from tests.fidelity.places import Truth, places_of
from tests.fidelity.ranks import LaunchedRank
from tests.oracle import Oracle

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


class Adapted(Measurement):
    """One architecture's engine with adapters, and the truth about each.

    Args:
        folder: where checkpoints are written to.
        arch: the architecture.
        ranks: the tensor-parallel size.
        dtype: what the engine computes in; the truth is float32.

    Attributes:
        requests: of the base model and of each adapter.
        truth: of the base model and of each adapter.
    """

    def __init__(self, folder: Path, arch: str, ranks: int, dtype: str = "float32") -> None:
        checkpoint = write_demo_model(folder / "base", arch)
        merged = [
            write_adapter(checkpoint, folder / name, *how, seed) for seed, (name, how) in enumerate(ADAPTERS.items())
        ]
        adapters = Adapters({name: str(folder / name) for name in ADAPTERS})
        self.requests: list[LoRARequest | None] = [None, *adapters.requests]
        spread: dict[str, Any] = {}
        if ranks > 1:
            spread = {"tensor_parallel_size": ranks, "distributed_executor_backend": LaunchedRank}
        self.engine = LocalEngine(checkpoint, dtype=dtype, **adapters.options({}), **spread)
        self.places = places_of(checkpoint, self.engine.worker.interpose_tree)
        self.truth = self._truth = [Truth.of(Oracle(weights), PROMPTS[0], STEPS) for weights in (checkpoint, *merged)]

    def cells(self) -> Cells:
        """Return the largest error of each row for each adapter, all of them in one batch, or the refusal."""
        cells: Cells = {}
        source = self._source(0)
        sampling = {"max_tokens": STEPS, "ignore_eos": True}
        blocks = [[Block(PROMPTS[0], source, sampling, lora=lora)] for lora in self.requests]
        for i, ran in enumerate(self.engine.run_traces(blocks, plain=tuple(BESIDE))[: len(blocks)]):
            assert ran.failure is None, ran.failure
            assert ran.token_ids == self.truth[i].raw.tokens
            if ran.saved:  # one rank reports
                self._note(cells, ["no adapter", *ADAPTERS][i], i, ran.saved)
        return cells

    def _read(self, prompt: int) -> list[int]:
        """Return the places that are read with an adapter: all of them."""
        return list(range(len(self.places)))


def main() -> None:
    """Measure as one rank; see the module's docstring."""
    result, folder, *architectures = sys.argv[1:]
    rank, ranks = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    prepare_environment(ranks)
    measured = {}
    for arch in architectures:
        one = Adapted(Path(folder) / f"{arch}-{rank}", arch, ranks)
        measured[arch] = one.cells()
        assert one.engine.interleaver.idle
        one.engine.close()
    if rank == "0":
        Path(result).write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
