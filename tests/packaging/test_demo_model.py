"""Demo models: what transformers generates from them, and that the engine generates the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from interpose.cli import demo_model
from interpose.cli.demo_model import ARCHITECTURES, Shape, write_demo_model
from interpose.cli.parsing import Parser

PROMPTS = ["The Eiffel Tower is in", "When Mary and John", "naïve café ☕", "x"]
TOKENS = 12

# In a process of its own: an engine in this one would leave its threads and global state to the tests that follow.
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
path, prompts, tokens = json.loads(sys.argv[1])
llm = LLM(path, dtype="float32", enforce_eager=True, max_model_len=512)
outputs = llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0), use_tqdm=False)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def continuations(checkpoint: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        generated = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
        tokens.append(generated[0, ids.shape[1] :].tolist())
    return tokens


def test_any_text_survives_the_tokenizer(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for text in [*PROMPTS, " two  spaces\n\tand\x00 bytes 漢字 🙂"]:
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_prompts_lead_to_different_legible_text(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokens = continuations(checkpoint)
    assert len({tuple(t) for t in tokens}) == len(PROMPTS)
    assert all(len(t) == TOKENS for t in tokens)
    text = "".join(tokenizer.decode(t) for t in tokens)
    assert text.isascii()
    assert text.isprintable()


# Of the others, tests/fidelity compares every value and token.
@pytest.mark.parametrize("checkpoint", ["gpt2", "llama", "qwen3"], indirect=True)
def test_the_engine_generates_what_transformers_does(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    command = [sys.executable, "-c", ENGINE, json.dumps([str(checkpoint), PROMPTS, TOKENS])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == continuations(checkpoint)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    shape = Shape(layers=1)
    first, same, other = (
        AutoModelForCausalLM.from_pretrained(write_demo_model(tmp_path / name, "llama", shape, seed)).lm_head.weight
        for name, seed in [("first", 1), ("same", 1), ("other", 2)]
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def command(*arguments: str) -> int:
    parser = Parser()
    demo_model.add_parser(parser.add_subparsers())
    args = parser.parse_args(["demo-model", *arguments])
    status: int = args.run(args)
    return status


def test_the_command_takes_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 2 --hidden 96 --heads 6 --kv-heads 3 --vocab 400 --context 128 --seed 7".split()
    assert command(str(tmp_path), "--arch", "qwen3", *sizes) == 0
    assert "qwen3, 2 layers, hidden size 96" in capsys.readouterr().out
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    wanted |= {"head_dim": 32, "vocab_size": 400, "max_position_embeddings": 128, "dtype": "float32"}
    assert {name: config[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vocab", "100"], "259 tokens or more"),
        (["--heads", "4", "--kv-heads", "3"], "cannot share 3 key/value heads"),
        (["--arch", "gpt2", "--hidden", "64"], "32 or more"),
    ],
)
def test_the_command_refuses_sizes_that_do_not_go_together(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(tmp_path / "model"), *arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
