"""Prompts go by the model's own tokenizer, and tokens are shown with escapes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import interpose
from interpose import verbs
from interpose.verbs.tokens import as_array, encode, escaped, layer_of, prompts_of, texts

EXAMPLES = Path(__file__).parents[4] / "examples"


def test_a_plain_tokenizer_serves_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package `tokenizers` gives objects with ids where transformers gives lists."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    plain = SimpleNamespace(
        encode=lambda text: SimpleNamespace(ids=[7, 8]),
        get_added_tokens_decoder=lambda: {0: SimpleNamespace(special=True), 5: SimpleNamespace(special=False)},
    )
    model = SimpleNamespace(tokenizer=plain)
    assert encode(model, "a b") == [7, 8]
    assert importlib.import_module("experiment").special_ids(model) == {0}


def test_prompts_are_one_or_several() -> None:
    assert prompts_of("a b") == ["a b"] and prompts_of([1, 2]) == [[1, 2]] and prompts_of(["a", [1]]) == ["a", [1]]
    for nothing in ([], ()):
        with pytest.raises(interpose.InvalidArgument, match="no prompt"):
            prompts_of(nothing)
    with pytest.raises(interpose.InvalidArgument, match="no tokens"):
        encode(SimpleNamespace(tokenizer=None), [])


def test_tokens_are_shown_with_escapes() -> None:
    words = {1: " Paris", 2: "\n\t", 3: "é", 4: "\\n"}
    model = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: words[ids[0]]))
    assert texts(model, [1, 2, 3, 4, 1]) == (" Paris", "\\n\\t", "é", "\\\\n", " Paris")
    assert escaped("\x1b") == "\\x1b"


def test_half_precision_becomes_numbers() -> None:
    values = as_array(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert values.dtype == np.float64
    assert values.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("layers", "depth", "layer"), [(4, 0.5, 2), (30, 0.375, 11), (80, 1.0, 79), (1, 0.5, 0)])
def test_layers_are_chosen_by_depth(layers: int, depth: float, layer: int) -> None:
    assert verbs.layer_at(SimpleNamespace(blocks=[None] * layers), depth) == layer


def test_a_layer_counts_from_either_end() -> None:
    model = SimpleNamespace(blocks=[None] * 4)
    assert [layer_of(model, layer) for layer in (None, 0, 3, -1)] == [2, 0, 3, 3]
    with pytest.raises(interpose.InvalidArgument, match="from 0 to 3"):
        layer_of(model, 4)


def test_special_tokens_stay_out_of_random_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    probe = importlib.import_module("probe")
    special = {0, 1, 2, 17, 99}
    ids = probe.prompts(100, special)
    assert ids.shape == (probe.PROMPTS, probe.LENGTH)
    assert not special & set(ids.reshape(-1).tolist())


def test_importing_the_verbs_brings_nothing_heavy_and_a_fit_says_what_it_needs() -> None:
    code = (
        "import sys; from interpose import verbs, plots\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'ray', 'vllm'} & set(sys.modules)))\n"
        "sys.modules['torch'] = None\n"
        "try: verbs.fit_jacobian_lens('x', [[1]])\nexcept ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.strip().splitlines()
    assert first == "[]" and "pip install torch transformers" in second
