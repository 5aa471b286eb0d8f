"""Every architecture's bindings: each location has a value in each step, and an edit of it reaches the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from interpose.cli.demo_model import ARCHITECTURES, Shape, write_demo_model
from tests.oracle import Edit, Oracle, Reference, difference, locations

PROMPT = [5, 400, 17, 99]
STEPS = 2


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(layers=2, hidden=128, context=256)
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param, shape)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def plain(oracle: Oracle) -> Reference:
    return oracle.run(PROMPT, STEPS)


def disturbed(value: Any) -> Any:
    """Return a value whose every tensor is changed, each element of a pair differently."""
    if isinstance(value, torch.Tensor):
        return value * 0.5 + torch.linspace(-0.3, 0.3, value.shape[-1])
    return tuple(None if item is None else disturbed(item) * (1 + i) for i, item in enumerate(value))


def test_every_location_has_its_rows_in_every_step(checkpoint: Path, plain: Reference) -> None:
    listed = locations(checkpoint)
    assert {(at.path, at.kind, step) for at in listed for step in range(STEPS)} == set(plain.values)
    for (path, _, step), value in plain.values.items():
        tensor = value[0] if isinstance(value, tuple) else value
        assert tensor.shape[0] == (len(PROMPT) if step == 0 and path != "logits" else 1), path


def test_both_kinds_of_names_see_one_model(oracle: Oracle, plain: Reference) -> None:
    canonical = oracle.run(PROMPT, STEPS, canonical=True)
    assert canonical.tokens == plain.tokens
    assert torch.equal(canonical.logits[1], plain.logits[1])


def test_an_edit_that_returns_its_value_changes_nothing(oracle: Oracle, checkpoint: Path, plain: Reference) -> None:
    same = oracle.run(PROMPT, STEPS, [Edit(at.path, at.kind, lambda value: value) for at in locations(checkpoint)])
    for key, value in plain.values.items():
        assert difference(same.values[key], value) == 0.0, key


@pytest.mark.parametrize("in_place", [False, True], ids=["replaced", "in_place"])
def test_an_edit_anywhere_reaches_the_logits(
    oracle: Oracle, checkpoint: Path, plain: Reference, in_place: bool
) -> None:
    for at in locations(checkpoint):
        edited = oracle.run(PROMPT, edits=[Edit(at.path, at.kind, disturbed, in_place=in_place)])
        assert difference(edited.logits[0], plain.logits[0]) > 1e-3, str(at)
