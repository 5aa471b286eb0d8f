"""The tokenizer files of a served model, for clients that encode and decode themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from interpose.v1 import service_pb2

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)


def tokenizer_files(model: str, revision: str | None = None) -> list[Path]:
    """Return the existing files, from a local directory or the local Hugging Face cache."""
    if Path(model).is_dir():
        return [path for name in FILES if (path := Path(model) / name).is_file()]
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(model, name, revision=revision) for name in FILES]
    return [Path(path) for path in found if isinstance(path, str)]


def chunks(files: list[Path], chunk_bytes: int) -> Iterator[service_pb2.TokenizerChunk]:
    """Yield the files one after another, in chunks; an empty file is one empty chunk."""
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = True
            while first or file.tell() < size:
                yield service_pb2.TokenizerChunk(name=path.name, size=size, data=file.read(chunk_bytes))
                first = False
