"""The rows of `benchmarks.tiers`: blocks, and the ratio to stock vLLM that each is to reach.

A block works on the output of one layer, or of every layer, in every step. It is written as a notebook would have it; nothing is
declared before the engine starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAYER = 4  # the layer of a block that works on one layer
FEATURES = 8192  # features of the sparse autoencoder
DIRECTIONS = 512  # directions of the probe
TOP = 4  # values of the probe that are kept in each step

CAPTURE_ONE = f"""\
kept = []
for step in tracer.iter[:]:
    kept.append(model.model.layers[{LAYER}].output[0].save())
"""
CAPTURE_ALL = """\
kept = []
for step in tracer.iter[:]:
    for layer in model.model.layers:
        kept.append(layer.output[0].save())
"""
CAPTURE_PROMPT = f"""\
kept = [model.model.layers[{LAYER}].output[0].save()]
"""
STEER = f"""\
for step in tracer.iter[:]:
    model.model.layers[{LAYER}].output[0][:] += vector
"""
AUTOENCODER = f"""\
for step in tracer.iter[:]:
    h = model.model.layers[{LAYER}].output[0]
    features = torch.relu(h @ W_enc + b_enc)
    h[:] += 0.1 * (features @ W_dec - h)
"""
PROBE = f"""\
kept = []
for step in tracer.iter[:]:
    h = model.model.layers[{LAYER}].output[0]
    kept.append(torch.relu(h @ W).topk({TOP}).values.save())
"""
# A value that decides between two ways of a tensor program.
DECIDE_ONE = f"""\
for step in tracer.iter[:]:
    h = model.model.layers[{LAYER}].output[0]
    if float(h.norm()) > 0:
        h[:] += vector
"""
DECIDE_ALL = """\
for step in tracer.iter[:]:
    for layer in model.model.layers:
        h = layer.output[0]
        if float(h.norm()) > 0:
            h[:] += vector
"""
# The same, with an exception that Python catches, which no tensor program can hold.
UNPLANNABLE_ONE = f"""\
for step in tracer.iter[:]:
    h = model.model.layers[{LAYER}].output[0]
    try:
        if float(h.norm()) > 0:
            h[:] += vector
    except ArithmeticError:
        pass
"""
UNPLANNABLE_ALL = """\
for step in tracer.iter[:]:
    for layer in model.model.layers:
        h = layer.output[0]
        try:
            if float(h.norm()) > 0:
                h[:] += vector
        except ArithmeticError:
            pass
"""
# The same without a wait for the device: Python of the block's own in every step.
PYTHON_ONE = f"""\
seen = {{}}
kept = []
for step in tracer.iter[:]:
    kept.append(model.model.layers[{LAYER}].output[0].save())
    seen[step % 3] = seen.get(step % 3, 0) + 1
"""


@dataclass(frozen=True)
class Row:
    """One kind of block, and how its requests run.

    Attributes:
        source: the block; "" for none.
        captured: names of `constants` that the block reads.
        traced: requests of the batch that have the block; None for all.
        tokens: new tokens of each request; None for the number of the run.
        kept: whether the block keeps a value of "one", "some" or "all" layers in each step; "" if it keeps none.
        layers: how many layers "some" are.
        goals: the ratio to stock that is to be reached, by model and batch size.
        extra: whether the row runs only where it is named.
    """

    source: str
    captured: tuple[str, ...] = ()
    traced: int | None = None
    tokens: int | None = None
    kept: str = ""
    layers: int = 0
    goals: Mapping[tuple[str, int], float] = field(default_factory=dict)
    extra: bool = False

    def expected(self, layers: int, tokens: int) -> int:
        """Return how many values one request keeps.

        Args:
            layers: layers of the model.
            tokens: new tokens of the request.
        """
        return tokens * {"": 0, "one": 1, "some": self.layers, "all": layers}[self.kept]


def _goals(small: float | None, small_batch: float | None, large: float, large_one: bool = True) -> dict[Any, float]:
    """Return goals for 1B at batch 1 and 32, and for 8B.

    Args:
        small, small_batch, large: the goals; None for none.
        large_one: whether the goal for 8B is for batch 1 too.
    """
    goals = {("1b", 1): small, ("1b", 32): small_batch, ("8b", 32): large}
    goals |= {("8b", 1): large} if large_one else {}
    return {key: goal for key, goal in goals.items() if goal is not None}


_TAPS = _goals(1.06, 1.08, 1.04)

ROWS: dict[str, Row] = {
    "plain": Row("", traced=0, goals=_goals(1.02, 1.02, 1.02)),
    "capture one": Row(CAPTURE_ONE, kept="one", goals=_TAPS),
    "steer": Row(STEER, ("vector",), goals=_TAPS),
    "sae": Row(AUTOENCODER, ("W_enc", "b_enc", "W_dec"), goals=_TAPS),
    "probe": Row(PROBE, ("W",), kept="one", goals=_TAPS),
    "capture all": Row(CAPTURE_ALL, kept="all", goals=_goals(1.10, 1.15, 1.05)),
    "31 beside one": Row(CAPTURE_ONE, traced=1, kept="one", goals=_goals(None, 1.06, 1.04, large_one=False)),
    "first token": Row(CAPTURE_PROMPT, tokens=1, kept="one", goals=_goals(1.0, 1.1, 1.1)),
    "decide one": Row(DECIDE_ONE, ("vector",), goals=_goals(1.2, 1.5, 1.2)),
    "decide all": Row(DECIDE_ALL, ("vector",), goals=_goals(1.5, 4.0, 2.0)),
    "unplannable one": Row(UNPLANNABLE_ONE, ("vector",), goals=_goals(1.2, 1.5, 1.2)),
    "unplannable all": Row(UNPLANNABLE_ALL, ("vector",), goals=_goals(1.5, 4.0, 2.0)),
    "python one": Row(PYTHON_ONE, kept="one", goals=_goals(1.2, 1.5, 1.2), extra=True),
}


def with_locations(kind: str, count: int) -> Row:
    """Return a row whose block works on the first layers, each at a line of its own.

    Args:
        kind: "capture" or "steer".
        count: how many layers.
    """
    line = {
        "capture": "kept.append(model.model.layers[{}].output[0].save())",
        "steer": "model.model.layers[{}].output[0][:] += vector",
    }[kind]
    body = "".join(f"    {line.format(layer)}\n" for layer in range(count))
    source = f"for step in tracer.iter[:]:\n{body}"
    return Row(source, ("vector",)) if kind == "steer" else Row(f"kept = []\n{source}", kept="some", layers=count)


def constants(hidden: int, dtype: Any) -> dict[str, Any]:
    """Return the tensors that blocks read, by name, on the CPU.

    They are the same in every process: `vector` [hidden], `W` [hidden, DIRECTIONS], `W_enc` [hidden, FEATURES], `b_enc`
    [FEATURES] and `W_dec` [FEATURES, hidden].

    Args:
        hidden: the model's hidden size.
        dtype: torch's type of the model.
    """
    import torch

    made = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=made) * 0.02).to(dtype)

    return {
        "vector": torch.full((hidden,), 0.01, dtype=dtype),
        "W": normal(hidden, DIRECTIONS),
        "W_enc": normal(hidden, FEATURES),
        "b_enc": normal(FEATURES),
        "W_dec": normal(FEATURES, hidden),
    }
