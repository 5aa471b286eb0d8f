"""The served model's tokenizer, loaded from the files that the server sends."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

from interpose.contract.errors import EngineError, InterposeError
from interpose.rpc.channel import Transport
from interpose.v1.service_pb2 import GetTokenizerRequest

MAX_BYTES = 1 << 30


def download(transport: Transport, model: str, folder: Path) -> list[Path]:
    """Write the tokenizer's files into a folder and return them.

    Raises:
        EngineError: a file's name is not plain, or a file is not complete, or the files are too large.
    """
    files: dict[str, tuple[Path, int]] = {}
    total = 0
    for chunk in transport.stream("GetTokenizer", GetTokenizerRequest(model=model)):
        if Path(chunk.name).name != chunk.name or chunk.name in ("", ".", "..") or "\\" in chunk.name:
            raise EngineError(
                f"the server sent a tokenizer file with the name {chunk.name!r}, which is no plain file name"
            )
        total += len(chunk.data)
        if total > MAX_BYTES:
            raise EngineError(f"the server's tokenizer is larger than {MAX_BYTES >> 20} MiB")
        path = folder / chunk.name
        with path.open("ab" if chunk.name in files else "wb") as file:
            file.write(chunk.data)
        files[chunk.name] = (path, chunk.size)
    for name, (path, size) in files.items():
        if path.stat().st_size != size:
            raise EngineError(f"the tokenizer file {name} has {path.stat().st_size} bytes instead of {size}")
    return [path for path, _ in files.values()]


def load(transport: Transport, model: str) -> Any:
    """Return the tokenizer: of `transformers` where it is installed, else of `tokenizers`.

    Raises:
        InterposeError: neither package is installed, or the package cannot load the model's tokenizer.
    """
    with tempfile.TemporaryDirectory(prefix="interpose-tokenizer-") as name:
        folder = Path(name)
        files = download(transport, model, folder)
        if not files:
            raise InterposeError(f"the server has no tokenizer files for {model}; give token ids as prompts")
        try:
            with warnings.catch_warnings():
                # Of tqdm, in a notebook without ipywidgets, when transformers is imported.
                warnings.filterwarnings("ignore", message="IProgress not found")
                from transformers import AutoTokenizer
        except ImportError:
            return _load_plain(folder)
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise InterposeError(f"transformers cannot load the tokenizer of {model}: {error}") from error


def _load_plain(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InterposeError(
            "model.tokenizer needs the package `tokenizers` (or `transformers`): pip install tokenizers; prompts can be "
            "strings without it, the server turns them into tokens"
        ) from None
    path = folder / "tokenizer.json"
    if not path.exists():
        raise InterposeError(
            "the model has no tokenizer.json; its tokenizer needs `transformers`: pip install transformers"
        )
    return Tokenizer.from_file(str(path))
