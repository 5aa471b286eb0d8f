"""Prompts of the examples go by the model's own tokenizer; those that make no experiment are refused."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.examples import made_up

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def of(name: str) -> Any:
    return importlib.import_module(name)


def test_prompts_of_different_lengths_are_refused_with_their_tokens() -> None:
    with pytest.raises(of("experiment").NoExperiment) as refused:
        of("activation_patching").encode_both(made_up.model(4), "one two three", "one two")
    said = str(refused.value)
    assert "the same number of tokens" in said
    assert " 3 tokens: ['The', '·Eiffel', '·Tower']" in said
    assert " 2 tokens: ['The', '·Eiffel']" in said
    assert "--clean and --corrupted" in said


def test_the_same_prompt_twice_is_refused() -> None:
    with pytest.raises(of("experiment").NoExperiment, match="are the same"):
        of("activation_patching").encode_both(made_up.model(4), "one two", "one two")


def test_a_plain_tokenizer_serves_as_well() -> None:
    """The package `tokenizers` gives objects with ids where transformers gives lists."""
    plain = SimpleNamespace(
        encode=lambda text: SimpleNamespace(ids=[7, 8]),
        get_added_tokens_decoder=lambda: {0: SimpleNamespace(special=True), 5: SimpleNamespace(special=False)},
    )
    model = SimpleNamespace(tokenizer=plain)
    assert of("experiment").encode(model, "a b") == [7, 8]
    assert of("experiment").special_ids(model) == {0}


def test_half_precision_becomes_numbers() -> None:
    values = of("experiment").as_array(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert values.dtype == np.float64
    assert values.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("layers", "depth", "layer"), [(4, 0.5, 2), (30, 0.375, 11), (80, 1.0, 79), (1, 0.5, 0)])
def test_layers_are_chosen_by_depth(layers: int, depth: float, layer: int) -> None:
    assert of("experiment").layer_at(made_up.model(layers), depth) == layer


def test_special_tokens_stay_out_of_random_prompts() -> None:
    special = {0, 1, 2, 17, 99}
    ids = of("probe").prompts(100, special)
    assert ids.shape == (of("probe").PROMPTS, of("probe").LENGTH)
    assert not special & set(ids.reshape(-1).tolist())


def test_heads_and_layers_are_spread_evenly() -> None:
    assert of("attention").spread(4, 8) == [0, 1, 2, 3]
    shown = of("attention").spread(80, 8)
    assert (len(shown), shown[0], shown[-1]) == (8, 0, 79)
    patterns = np.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2)
    squares = of("attention").mosaic(patterns)
    assert squares.shape == (5, 8)
    assert squares[3:5, 6:8].tolist() == patterns[1, 2].tolist()
    assert np.isnan(squares[2]).all()
