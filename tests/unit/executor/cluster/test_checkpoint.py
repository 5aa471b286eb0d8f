"""What is missing in a model's folder is named before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor.cluster.checkpoint import check_model, check_on_node
from serve_app.settings import ModelSettings
from tests.unit.checkpoints import write_checkpoint, write_safetensors


def check(folder: Path | str, adapters: dict[str, str] | None = None, **engine: Any) -> None:
    """Check a model with these arguments of the engine."""
    check_model(ModelSettings(model=str(folder), name="m", engine=engine, lora_modules=adapters or {}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "models" / "tiny-llama")


def cut(file: Path, size: int) -> None:
    """Leave only the first bytes of a file."""
    file.write_bytes(file.read_bytes()[:size])


def list_two_shards(folder: Path) -> None:
    """Say that the weights are in two files, of which one is there."""
    shards = {"a": "model.safetensors", "b": "model-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def test_a_whole_model_passes(folder: Path) -> None:
    check(folder)
    check(folder, tokenizer=str(folder))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "{f} is no model: it has no config.json or params.json"),
        (lambda f: (f / "config.json").write_text("{"), "{f}/config.json is no JSON: Expecting property name"),
        (lambda f: (f / "config.json").write_text("[]"), "{f}/config.json is no JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "{f} has no weights: there is no file *.safetensors or"),
        (
            lambda f: (f / "tokenizer.json").unlink(),
            "{f} has no tokenizer: there is no tokenizer.json, tokenizer.model",
        ),
        (list_two_shards, "{f} lacks model-00002.safetensors, which model.safetensors.index.json lists"),
        (lambda f: cut(f / "model.safetensors", 80), "{f}/model.safetensors is cut off: it has 80 bytes of 91"),
        (lambda f: cut(f / "model.safetensors", 40), "{f}/model.safetensors is damaged or cut off"),
        (lambda f: cut(f / "model.safetensors", 3), "{f}/model.safetensors is damaged or cut off"),
        (
            lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            "{f}/model.safetensors is a Git LFS pointer, not the weights: run `git lfs pull` in {f}",
        ),
    ],
)
def test_what_is_missing_is_named(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match="^" + re.escape(message.format(f=folder))):
        check(folder)


def test_only_what_the_engine_reads_must_be_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    check(folder, load_format="dummy")
    (folder / "tokenizer.json").unlink()
    check(folder, load_format="dummy", skip_tokenizer_init=True)
    other = folder.parent / "tokenizer"
    other.mkdir()
    with pytest.raises(ValueError, match=f"{other} has no tokenizer"):
        check(folder, load_format="dummy", tokenizer=str(other))
    (other / "vocab.json").write_text("{}")
    check(folder, load_format="dummy", tokenizer=str(other))
    (folder / "config.json").unlink()
    check(folder, load_format="dummy", tokenizer=str(other), hf_config_path="elsewhere")
    check("s3://bucket/model")


def test_a_folder_that_is_not_there_comes_with_near_misses(folder: Path) -> None:
    wrong = f"{folder.parent}/tiny-lama"
    with pytest.raises(ValueError, match=f"^there is no folder {wrong}; did you mean {folder}\\?$"):
        check(wrong)
    with pytest.raises(ValueError, match=f"there is no folder .*; did you mean {folder.parent}\\?$"):
        check(f"{folder.parent.parent}/model/tiny-llama")
    with pytest.raises(ValueError, match=r"there is no folder ~/models/tiny: '~' stands for"):
        check("~/models/tiny")
    with pytest.raises(ValueError, match=r"config.json is a file: name the folder"):
        check(folder / "config.json")


def test_every_node_with_workers_needs_the_weights(folder: Path) -> None:
    check_on_node("", "auto", "10.0.0.2")
    check_on_node("/nowhere", "dummy", "10.0.0.2")
    (folder / "config.json").unlink()  # the engine has it
    check_on_node(str(folder), "auto", "10.0.0.2")
    with pytest.raises(
        ValueError, match=r"^on node 10.0.0.2: there is no folder /nowhere; every node with workers needs"
    ):
        check_on_node("/nowhere", "auto", "10.0.0.2")
    cut(folder / "model.safetensors", 80)
    with pytest.raises(ValueError, match=r"^on node 10.0.0.2: .*model.safetensors is cut off"):
        check_on_node(str(folder), "auto", "10.0.0.2")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^on node 10.0.0.2: .* has no weights"):
        check_on_node(str(folder), "auto", "10.0.0.2")


def test_adapters_must_be_whole(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapters" / "calm"
    with pytest.raises(ValueError, match=f"lora_modules: calm: there is no folder {adapter}"):
        check(folder, {"calm": str(adapter)})
    adapter.mkdir(parents=True)
    with pytest.raises(ValueError, match="is no adapter: it has no adapter_config.json"):
        check(folder, {"calm": str(adapter)})
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="lora_modules: calm: .* has no weights"):
        check(folder, {"calm": str(adapter)})
    write_safetensors(adapter / "adapter_model.safetensors")
    check(folder, {"calm": str(adapter)})
    cut(adapter / "adapter_model.safetensors", 80)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is cut off"):
        check(folder, {"calm": str(adapter)})
