"""Turns a GGUF file into an ordinary checkpoint.

`python -m interpose.cli.gguf_checkpoint FILE DIRECTORY` runs it. A process of its own, because transformers asks only once,
when it is imported, for the two packages that this step needs (`gguf` and `accelerate`): the caller puts them on the path of
this process, and the service never has them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def convert(file: Path, directory: Path) -> None:
    """Write the model of a GGUF file as float32 safetensors, with its tokenizer.

    The generation config is written too.

    Args:
        file: of an architecture that transformers reads; its quantized weights become float32.
        directory: made if it is missing.

    Raises:
        ValueError: the file splits text in a way that is not known here.
        ImportError: transformers, `gguf` or `accelerate` is missing.
    """
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer(file)
    model = _float_model(file)
    special = {name: getattr(model.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**special)
    tokenizer.model_max_length = model.config.max_position_embeddings
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def _float_model(file: Path) -> Any:
    """Return the model without any trace of its quantization.

    transformers refuses to save a model that it has read from a GGUF file.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    # The file holds float32: 9.999999747378752e-06 is 1e-05 there.
    config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))
    with torch.device("meta"):
        model = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model


def _tokenizer(file: Path) -> Any:
    """Return the file's tokenizer, which splits text as the file says before it merges bytes.

    transformers knows some of the ways to split by their names in the file and takes GPT-2's for the others, silently.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(file).fields

    def said(name: str, default: Any = None) -> Any:
        return fields[name].contents() if name in fields else default

    kind, split = said("tokenizer.ggml.model"), said("tokenizer.ggml.pre")
    if (kind, split) != ("gpt2", "smollm"):
        raise ValueError(
            f"the tokenizer is of the kind {kind!r} and splits text as {split!r}; only 'gpt2', 'smollm' is known"
        )
    if said("tokenizer.ggml.add_bos_token", False) or said("tokenizer.ggml.add_eos_token", False):
        raise ValueError("the tokenizer adds tokens to a prompt, which is not known of 'smollm'")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
