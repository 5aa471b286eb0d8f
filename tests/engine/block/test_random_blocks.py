"""Random blocks give what the same code gives when it runs directly in transformers' forward pass."""

from __future__ import annotations

import contextlib
import linecache
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.engine.block.random_blocks import HELPERS, Writer, captured, direct, saved_names
from tests.engine.conftest import Bench
from tests.engine.notebook import notebook
from tests.oracle.direct import Direct

PROMPT = [5, 400, 17, 99, 256]
MISSING = object()


def cell(text: str, names: dict[str, Any]) -> None:
    """Run a notebook's cell."""
    name = f"<cell {hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    try:
        exec(compile(text, name, "exec"), names)
    finally:
        if text != HELPERS:  # its functions are looked up when they travel
            del linecache.cache[name]


def notebook_names() -> dict[str, Any]:
    names = {"__name__": "__main__", "torch": torch, "contextlib": contextlib}
    cell(HELPERS, names)
    return names


def compare(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor) and found.shape == expected.shape, (where, found, expected)
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        error = (found - expected).abs().max().item() if expected.numel() else 0.0
        assert error <= 1e-4 * scale, (where, error)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            compare(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected), (where, found, expected)
        for index, value in enumerate(expected):
            compare(found[index], value, f"{where}[{index}]")
    else:
        assert type(found) is type(expected) and found == expected, (where, found, expected)


@pytest.mark.timeout(900)  # seconds where the machine is otherwise idle
@settings(
    max_examples=16,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # shrinking takes minutes; the failing program is printed as it is
    suppress_health_check=list(HealthCheck),
)
@given(st.randoms(use_true_random=False))
def test_random_blocks(bench: Bench, source: random.Random) -> None:
    attention = "attn" if bench.arch == "gpt2" else "self_attn"
    layers = range(bench.oracle.config.num_hidden_layers)
    paths = [f"{bench.block(layer)}.{part}" for layer in layers for part in (attention, "mlp")]
    program, steps = Writer(source, len(paths)).program()
    text = captured(program, steps)
    note(text)
    model = notebook(bench.engine)
    names = notebook_names()
    expected = Direct(bench.oracle, paths).run(direct(program, steps), notebook_names(), PROMPT, steps)
    spots = [module_at(model, path) for path in paths]
    names.update(model=model, prompt=PROMPT, spots=spots)
    cell(text, names)
    for name in saved_names(program):
        if name in expected or name in names:
            compare(names.get(name, MISSING), expected.get(name, MISSING), name)
    assert names["scaler"].seen == [], "the block has an object of its own"


def module_at(model: Any, path: str) -> Any:
    for part in path.split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model
