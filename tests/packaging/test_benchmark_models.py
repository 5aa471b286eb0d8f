"""The models that the benchmarks write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tensor_parallel
from benchmarks.models import SIZES, Model


@pytest.mark.parametrize("size", SIZES)
def test_models_of_every_size(size: str, tmp_path: Path) -> None:
    """The large ones have a configuration and a tokenizer, and no weights."""
    options = Model(size, "bfloat16", gpu=True).write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / "tokenizer.json").is_file()
    assert bool(list(tmp_path.glob("*.safetensors"))) == (size == "small") == ("load_format" not in options)
    assert options["dtype"] == "bfloat16" and not options["enforce_eager"]
    longest = max(group.prompt_tokens + group.tokens for group in tensor_parallel.GROUPS.values())
    assert longest <= options["max_model_len"] <= config["max_position_embeddings"]
    for name, count in {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": tensor_parallel.LAYERS,
    }.items():
        assert config[name] >= count
