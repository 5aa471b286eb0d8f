"""Measures an engine with LoRA adapters: each request is compared with transformers on weights that its adapter was merged into.

`python -m tests.fidelity.lora RESULT FOLDER ARCHITECTURE…` is one rank of several, as of `tests.fidelity.measure`; with
`--half` in bfloat16, as of `tests.fidelity.half`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.lora.request import LoRARequest

from benchmarks.layouts import Layout
from executor.model.lora import Adapters
from executor.plugin.config import prepare_environment
from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.fidelity.adapters import ADAPTERS, write_adapter
from tests.fidelity.half import Compared, Halves, triple
from tests.fidelity.measure import BESIDE, PHASES, PROMPTS, STEPS, Cells, Measurement, Ran, spread
from tests.fidelity.places import Truth, places_of
from tests.oracle import Oracle, difference

SECONDS = 900


def over_two_ranks(folder: Path, *options: str) -> dict[str, Any]:
    """Measure the llama in two tensor-parallel ranks; returns its rows.

    Args:
        folder: for checkpoints, the result and what the ranks print.
        options: of the command.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",  # the ranks wait for each other without sleep, each thread of them for its like
    }  # fmt: skip
    result = folder / "found.json"
    command = [sys.executable, "-m", "tests.fidelity.lora", *options, str(result), str(folder), "llama"]
    ranks = []
    for rank in range(2):
        with (folder / f"rank-{rank}.txt").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    command,
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=Path(__file__).parents[2],
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
            )
    try:
        for rank, process in enumerate(ranks):
            assert process.wait(SECONDS) == 0, (folder / f"rank-{rank}.txt").read_text()[-4000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    rows: dict[str, Any] = json.loads(result.read_text())["llama"]
    return rows


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
        weights: the checkpoint of each, with its adapter merged in.
    """

    NAMES = ("no adapter", *ADAPTERS)

    def __init__(self, folder: Path, arch: str, ranks: int, dtype: str = "float32") -> None:
        self._off = difference
        checkpoint = write_demo_model(folder / "base", arch)
        merged = [
            write_adapter(checkpoint, folder / name, *how, seed) for seed, (name, how) in enumerate(ADAPTERS.items())
        ]
        adapters = Adapters({name: str(folder / name) for name in ADAPTERS})
        self.requests: list[LoRARequest | None] = [None, *adapters.requests]
        self.engine = LocalEngine(checkpoint, dtype=dtype, **adapters.options({}), **spread(Layout(ranks, 1)))
        self.places = places_of(checkpoint, self.engine.worker.interpose_tree)
        self.weights = [checkpoint, *merged]
        self.truth = self._truth = [Truth.of(Oracle(weights), PROMPTS[0], STEPS) for weights in self.weights]

    def cells(self) -> Cells:
        """Return the largest error of each row for each adapter, all of them in one batch, or the refusal."""
        cells: Cells = {}
        for i, ran in enumerate(self._rans()):
            assert ran.token_ids == self.truth[i].raw.tokens
            if ran.saved:  # one rank reports
                self._note(cells, self.NAMES[i], i, ran.saved)
        return cells

    def halves(self) -> Halves:
        """Return how far off each row is for each adapter, and transformers' bfloat16 there, all of them in one batch."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        halves: dict[str, dict[str, Compared | str]] = {}
        for weights, name, ran in zip(self.weights, self.NAMES, self._rans(), strict=True):
            if not ran.saved:
                continue
            rounded = Oracle(weights, dtype=torch.bfloat16, device=device)
            exactly, roundly = (
                Truth.of(one, PROMPTS[0], STEPS, force=ran.token_ids) for one in (Oracle(weights), rounded)
            )
            for i, place in enumerate(self.places):
                row = halves.setdefault(place.row, {})
                for step in range(STEPS):
                    under, refused = f"{PHASES[step]}, {name}", ran.saved["refused"].get((i, step))
                    if refused is not None:
                        row[under] = place.generally(refused)
                        continue
                    known = row.setdefault(under, Compared())
                    assert isinstance(known, Compared), f"{place.source} is given, and refused: {known}"
                    known.add(*triple(place, exactly, roundly, step, ran.saved["values"][i, step]))
        return {
            row: {under: one if isinstance(one, str) else one.pair() for under, one in found.items()}
            for row, found in halves.items()
        }

    def _rans(self) -> list[Ran]:
        """Run a block that reads everything without an adapter and with each, in one batch."""
        sampling = {"max_tokens": STEPS, "ignore_eos": True}
        blocks = [[Block(PROMPTS[0], self._source(0), sampling, lora=lora)] for lora in self.requests]
        rans = self.engine.run_traces(blocks, plain=tuple(BESIDE))[: len(blocks)]
        for ran in rans:
            assert ran.failure is None, ran.failure
        return rans

    def _read(self, prompt: int) -> list[int]:
        """Return the places that are read with an adapter: all of them."""
        return list(range(len(self.places)))


def main() -> None:
    """Measure as one rank; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", action="store_true")
    parser.add_argument("result", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("architectures", nargs="+")
    args = parser.parse_args()
    rank, ranks = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    prepare_environment(ranks)
    measured: dict[str, Cells | Halves] = {}
    for arch in args.architectures:
        one = Adapted(args.folder / f"{arch}-{rank}", arch, ranks, "bfloat16" if args.half else "float32")
        measured[arch] = one.halves() if args.half else one.cells()
        assert one.engine.interleaver.idle
        one.engine.close()
    if rank == "0":
        args.result.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
