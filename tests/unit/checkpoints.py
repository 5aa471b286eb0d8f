"""Folders that look like models to whatever does not load them."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def write_safetensors(file: Path, size: int = 16) -> None:
    """A file of weights with one tensor of `size` bytes."""
    header = json.dumps({"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def write_checkpoint(folder: Path) -> Path:
    """A folder with a configuration, weights and a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    return folder
