"""What vLLM says of a configuration that it does not take, as the reason why an engine does not start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from executor.cluster.start_failure import failure_of
from interpose.cli.demo_model import write_demo_model


def reason(model: Path, **engine: Any) -> str:
    """Why an engine with these arguments does not start."""
    with pytest.raises(ValueError) as caught:
        AsyncEngineArgs(model=str(model), **engine).create_engine_config()
    failure = failure_of(caught.value)
    assert failure.permanent
    return failure.reason


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama")


def test_an_architecture_that_the_engine_does_not_know(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["LamaForCausalLM"]}))
    said = reason(other)
    assert said.startswith(
        "vLLM does not know the architecture ['LamaForCausalLM'], which the model's config.json names"
    )
    assert "did you mean LlamaForCausalLM" in said and len(said) < 300


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("dtype", "flaot32", "dtype: Input should be 'auto'"),
        ("quantization", "awqq", "Unknown quantization method: awqq"),
        ("max_model_len", 10**7, "User-specified max_model_len (10000000) is greater than"),
    ],
)
def test_an_argument_that_the_engine_does_not_take(checkpoint: Path, argument: str, value: Any, words: str) -> None:
    assert reason(checkpoint, **{argument: value}).startswith(words)
