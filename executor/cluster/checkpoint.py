"""Checks a model's folder before anything slow is imported or started.

The check refuses only what vLLM would refuse for certain, minutes later and in other words. It imports the standard library
only; `executor.cluster.hub` asks the Hugging Face Hub about models that are no folder here.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from executor.cluster import hub

# Formats of weights that are known here, and the files that hold them; vLLM checks the other formats itself.
_ALL_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_WEIGHTS = {
    **dict.fromkeys(("auto", "hf", "mistral"), _ALL_WEIGHTS),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "pt": ("*.pt", "*.bin"),
    "npcache": ("*.bin",),
}
_CONFIGS = {"auto": ("config.json", "params.json"), "hf": ("config.json",), "mistral": ("params.json",)}
_VOCABULARIES = ("tokenizer.json", "*.model", "*vocab*", "*.tiktoken", "tekken.json", "*.gguf")
_TOKENIZER_MODES = ("auto", "hf", "slow", "mistral")
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_INDEX = "*.safetensors.index.json"
_LFS = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000  # bytes, of a safetensors file; the format's own bound

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]*\w)?")


class ModelSettings(Protocol):
    """What the check needs of a model's settings; `serve_app.settings.ModelSettings` is one."""

    @property
    def model(self) -> str: ...

    @property
    def engine(self) -> Mapping[str, Any]: ...

    @property
    def lora_modules(self) -> Mapping[str, str]: ...


def check_model(model: ModelSettings) -> None:
    """Refuse a model if a file that the engine needs is missing.

    The file is missing on this machine, or on the Hub.

    Raises:
        ValueError: with the missing part. It stays missing until somebody supplies it.
        ConnectionError: the Hub cannot be asked now, and the local cache has no such model.
    """
    engine = model.engine
    _check_source(model.model, engine.get("revision"), engine, weights=True)
    tokenizer = engine.get("tokenizer")
    if tokenizer and tokenizer != model.model and _needs_vocabulary(engine):
        _check_source(tokenizer, engine.get("tokenizer_revision"), engine, weights=False)
    for name, folder in model.lora_modules.items():
        _check_adapter(name, Path(folder).expanduser())


def check_on_node(folder: str, load_format: str, node: str) -> None:
    """Refuse a folder of weights that is whole on the engine's node, but not on this node.

    Args:
        folder: of the model; "" if it has none.
        load_format: the engine's argument.
        node: the address of this node.

    Raises:
        ValueError: with the node and the missing part.
    """
    wanted = _WEIGHTS.get(load_format)
    if not folder or not wanted:
        return
    there = Path(folder)
    try:
        if not there.is_dir():
            raise ValueError(f"there is no folder {folder}; every node with workers needs the model")
        if not _any([one.name for one in there.rglob("*")], wanted):
            raise ValueError(f"{folder} has no weights: there is no file {' or '.join(wanted)}")
        _check_weights(there)
    except ValueError as error:
        raise ValueError(f"on node {node}: {error}") from None


def _check_source(source: str, revision: str | None, engine: Mapping[str, Any], weights: bool) -> None:
    """Check a folder or a Hub id: of a model with `weights`, or of a tokenizer alone."""
    if "://" in source:
        return  # vLLM's own loaders fetch it
    path = Path(source)
    if path.is_dir():
        _check_folder(path, engine, weights)
    elif path.exists():
        if path.suffix != ".gguf":
            raise ValueError(f"{source} is a file: name the folder that contains the model")
    elif os.environ.get("VLLM_USE_MODELSCOPE", "0").lower() not in ("", "0", "false"):
        return
    elif not _HUB_ID.fullmatch(source):
        if not re.fullmatch(_HUB_ID.pattern + r":[\w.-]+", source):  # a quantization of a GGUF repository
            raise ValueError(_no_folder(source))
    else:
        found = hub.look(source, revision, engine.get("hf_token"), f"{_no_folder(source)}, and ")
        if isinstance(found, Path):
            _check_folder(found, engine, weights and not engine.get("download_dir"), f"the local cache of {source}")
        elif found is not None:
            _check_names(found, engine, weights, f"{source} on the Hugging Face Hub")


def _no_folder(source: str) -> str:
    """Say that there is no such folder, with near misses beside it."""
    if source.startswith("~"):
        return f"there is no folder {source}: '~' stands for the home directory in the shell only; write the whole path"
    path = Path(source)
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    try:
        beside = sorted(one.name for one in parent.iterdir() if one.is_dir())
    except OSError:
        beside = []
    missing = path.relative_to(parent).parts[0] if path.parts else ""
    near = difflib.get_close_matches(missing, beside, n=3)
    hint = f"; did you mean {' or '.join(str(parent / name) for name in near)}?" if near else ""
    return f"there is no folder {source}{hint}"


def _check_folder(folder: Path, engine: Mapping[str, Any], weights: bool, what: str = "") -> None:
    try:
        names = [one.relative_to(folder).as_posix() for one in (*folder.glob("*"), *folder.glob("*/*"))]
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from None
    _check_names(names, engine, weights, what or str(folder))
    if weights and "config.json" in names:
        _read_json(folder / "config.json")
    if weights and _load_format(engine) in _WEIGHTS:
        _check_weights(folder)


def _check_weights(folder: Path) -> None:
    for index in sorted(folder.glob(_INDEX)):
        _check_index(index)
    for file in sorted(folder.glob("*.safetensors")):
        check_safetensors(file)


def _check_names(names: Iterable[str], engine: Mapping[str, Any], weights: bool, what: str) -> None:
    """Refuse a model or a tokenizer by the names of its files."""
    files = [name.rpartition("/")[2] for name in names]
    top = {name for name in names if "/" not in name}
    configs = _CONFIGS.get(engine.get("config_format") or "auto", ())
    if (
        weights
        and configs
        and not engine.get("hf_config_path")
        and not top & {*configs}
        and not _any(files, ["*.gguf"])
    ):
        raise ValueError(f"{what} is no model: it has no {' or '.join(configs)}")
    wanted = _WEIGHTS.get(_load_format(engine))
    if weights and wanted and not _any(files, wanted):
        raise ValueError(
            f"{what} has no weights: there is no file {' or '.join(wanted)}; for random weights say load_format: dummy"
        )
    if engine.get("tokenizer") and weights:
        return
    if _needs_vocabulary(engine) and not _any(files, _VOCABULARIES):
        raise ValueError(
            f"{what} has no tokenizer: there is no tokenizer.json, tokenizer.model or vocab.json; name another folder or id "
            "that has one with the engine's argument tokenizer"
        )


def _any(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns for name in names)


def _load_format(engine: Mapping[str, Any]) -> str:
    return str(engine.get("load_format") or "auto").lower()


def _needs_vocabulary(engine: Mapping[str, Any]) -> bool:
    # A tokenizer that brings its own code reads files of any name.
    own = engine.get("skip_tokenizer_init") or engine.get("trust_remote_code")
    return not own and (engine.get("tokenizer_mode") or "auto") in _TOKENIZER_MODES


def _check_index(index: Path) -> None:
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict):
        raise ValueError(f"{index} is damaged: it has no weight_map")
    missing = sorted({str(name) for name in listed.values() if not (index.parent / str(name)).is_file()})
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{index.parent} lacks {', '.join(missing[:3])}{more}, which {index.name} lists")


def check_safetensors(file: Path) -> None:
    """Refuse a file of weights that is not whole, by its header and its size.

    Raises:
        ValueError: with the file and what is wrong with it.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(len(_LFS))
            if start == _LFS:
                raise ValueError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in {file.parent}")
            length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
            opened.seek(8)
            header = opened.read(length) if 0 < length <= min(size - 8, _LONGEST_HEADER) else b""
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    try:
        tensors = [one for name, one in json.loads(header).items() if name != "__metadata__"]
        expected = 8 + length + max((one["data_offsets"][1] for one in tensors), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise ValueError(f"{file} is damaged or cut off: it has no safetensors header ({size} bytes)") from None
    if size < expected:
        raise ValueError(f"{file} is cut off: it has {size} bytes of {expected}; copy or download it again")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"{file} is no JSON object")
    return read


def _check_adapter(name: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"lora_modules: {name}: {_no_folder(str(folder))}")
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(f"lora_modules: {name}: {folder} is no adapter: it has no adapter_config.json")
    found = [folder / one for one in _ADAPTER_WEIGHTS if (folder / one).is_file()]
    if not found:
        raise ValueError(f"lora_modules: {name}: {folder} has no weights: there is no {' or '.join(_ADAPTER_WEIGHTS)}")
    if found[0].suffix == ".safetensors":
        check_safetensors(found[0])
