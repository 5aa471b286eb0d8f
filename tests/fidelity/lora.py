"""Measures an engine with LoRA adapters: each request is compared with transformers on weights that its adapter was merged into.

`python -m tests.fidelity.lora RESULT FOLDER ARCHITECTURE…` is one rank of several, as of `tests.fidelity.measure`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from vllm.lora.request import LoRARequest

from executor.adapters import Adapters
from executor.options import prepare_environment
from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.fidelity.adapters import ADAPTERS, write_adapter
from tests.fidelity.layouts import Layout
from tests.fidelity.measure import BESIDE, PROMPTS, STEPS, Cells, Measurement, spread
from tests.fidelity.places import Truth, places_of
from tests.oracle import Oracle


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
        self.engine = LocalEngine(checkpoint, dtype=dtype, **adapters.options({}), **spread(Layout(ranks, 1)))
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
