"""What many different blocks cost plain requests beside them, and memory.

Eight plain requests generate without an end; a ninth request follows the other for as long as the benchmark runs. In turn it is a
plain request, one of a few known blocks, or a block that no request had before. Each block has its own text, so each is traced,
planned and, where the engine does so, captured into a graph of its own. The figures are the times between two tokens of the plain
requests, the stalls among them, and the memory of the device and of the process.

A stall is the longest time between two tokens while one of the requests in turn runs, less the median time beside plain requests.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models import Model
from benchmarks.rounds import Child
from benchmarks.tiers import engine_options

BLOCKS = 2000
SHORT = 40  # blocks on a CPU
KNOWN = 8  # blocks that are run again and again
CHUNK = 50  # requests in turn between two looks at the memory
SECONDS = 400.0  # seconds of the different blocks
_MIB = 1 << 20


def source(number: int, layers: int) -> str:
    """Return the text of a block: no other number has the same.

    Args:
        number: of the block, from 0.
        layers: layers of the model.
    """
    layer, other = number % layers, (number // 3 + 1) % layers
    scale = 1 + (number + 1) * 2.0**-20
    read = f"h = model.model.layers[{layer}].output[0]"
    kinds = (
        [f"kept.append((model.model.layers[{layer}].output[0] * {scale!r}).save())"],
        [f"model.model.layers[{layer}].output[0][:] *= {scale!r}"],
        [read, f"h[:] += {scale - 1!r} * torch.relu(h)"],
        [read, f"kept.append(torch.tanh(h * {scale!r}).topk({2 + number % 7}).values.save())"],
        [read, f"h[:] *= {scale!r}", "kept.append(h.norm(dim=-1).save())"],
        [f"g = model.model.layers[{other}].mlp.output", f"kept.append((g * {scale!r}).save())"],
    )
    lines = kinds[number % len(kinds)]
    return "kept = []\nfor step in tracer.iter[:]:\n" + "".join(f"    {line}\n" for line in lines)


@dataclass
class Phase:
    """The requests in turn of one kind, as far as they have run.

    Attributes:
        gaps: seconds between two tokens of a plain request.
        longest: for each request in turn, the longest of these times while it ran.
        memory: bytes after each chunk, by what they are of.
    """

    gaps: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)

    def take(self, answer: dict[str, Any]) -> None:
        """Add what a chunk gave."""
        self.gaps += answer["gaps"]
        self.longest += answer["longest"]
        self.memory.append(answer["memory"])

    def figures(self, usual: float) -> dict[str, float]:
        """Return the times in milliseconds.

        Args:
            usual: the usual seconds between two tokens.
        """
        stalls = [max(0.0, one - usual) for one in self.longest]
        return {
            "p50 ms": statistics.median(self.gaps) * 1e3,
            "p99 ms": percentile(self.gaps, 99) * 1e3,
            "longest ms": max(self.gaps) * 1e3,
            "stall p50 ms": statistics.median(stalls) * 1e3,
            "stall p99 ms": percentile(stalls, 99) * 1e3,
            "requests": len(self.longest),
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that so many per cent of the values do not exceed."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def run(
    *,
    model: str | None = None,
    dtype: str | None = None,
    blocks: int | None = None,
    seconds: float | None = None,
) -> dict[str, dict[str, float]]:
    """Return the times between tokens beside each kind of requests, and the memory.

    Args:
        model, dtype: see `Model.chosen`.
        blocks: how many different blocks there are; by default 2,000, and 40 on a CPU.
        seconds: seconds after which no further different blocks begin.
    """
    measured_model = Model.chosen(model, dtype)
    count = blocks or (BLOCKS if measured_model.gpu else SHORT)
    few = max(CHUNK if measured_model.gpu else KNOWN, count // 8)
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(measured_model, Path(folder))
        environment = {"VLLM_PLUGINS": "none"}
        child = Child("benchmarks.many_blocks_child", folder, json.dumps(options), environment=environment)
        try:
            phases = {
                "plain requests": _phase(child, ["plain"] * few),
                "known blocks, first": _phase(child, list(range(KNOWN)) * 2),
                "known blocks": _phase(child, [number % KNOWN for number in range(few)]),
                "different blocks": _phase(child, list(range(KNOWN, KNOWN + count)), seconds or SECONDS),
                "known blocks again": _phase(child, [number % KNOWN for number in range(few)]),
                "plain requests again": _phase(child, ["plain"] * few),
            }
        finally:
            child.close()
    return figures(phases)


def _phase(child: Child, numbers: Sequence[int | str], seconds: float | None = None) -> Phase:
    """Run requests in turn; numbers are those of blocks."""
    phase = Phase()
    began = time.monotonic()
    for start in range(0, len(numbers), CHUNK):
        if seconds is not None and time.monotonic() - began > seconds:
            print(f"  only {start} of {len(numbers)} blocks fitted into {seconds:g} s", flush=True)
            break
        phase.take(child.ask(numbers=numbers[start : start + CHUNK]))
    print(f"  {len(phase.longest)} requests in turn took {time.monotonic() - began:.0f} s", flush=True)
    return phase


def figures(phases: dict[str, Phase]) -> dict[str, dict[str, float]]:
    """Return the rows of the result: the times beside each kind of requests, and memory.

    Args:
        phases: the kinds by name, in the order in which they ran; "plain requests" and "different blocks" are among them.
    """
    usual = statistics.median(phases["plain requests"].gaps)
    rows = {f"between tokens, beside {name}": phase.figures(usual) for name, phase in phases.items()}
    names = list(phases)
    before = phases[names[names.index("different blocks") - 1]].memory[-1]
    during = phases["different blocks"].memory
    for what in before:
        values = [one[what] for one in during]
        rows[f"memory, {what}"] = {
            "before MiB": before[what] / _MIB,
            "half MiB": values[(len(values) - 1) // 2] / _MIB,
            "after MiB": values[-1] / _MIB,
            "most MiB": max(values) / _MIB,
        }
    return rows
