"""Parts that the experiments share: the command line, tokens, layers, and a direction."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pictures

import interpose

Run = Callable[..., Any]
Draw = Callable[[Any, Any, Path], None]


class NoExperiment(Exception):
    """The prompts or the model make no sensible experiment.

    The message says why, and what to write instead.
    """


def main(
    doc: str | None,
    run: Run,
    draw: Draw,
    picture: str,
    prompts: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Connect, run one experiment on the served model, and draw what it found.

    Args:
        doc: the experiment's docstring; its first line is the command's description.
        run: the experiment; gets the model, and each prompt under its name.
        draw: gets the model, what `run` returned, and the file to write.
        picture: the file's name unless the command line gives one.
        prompts: the experiment's prompts; each can be given on the command line under its name.
        argv: the command line, without the program.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--address", default="localhost:9000", help="of the service")
    parser.add_argument("--model", help="name of the served model, if there are several")
    parser.add_argument("--picture", type=Path, default=Path(picture), help="the PNG file to write")
    for name, prompt in (prompts or {}).items():
        shown = prompt.replace("%", "%%")
        parser.add_argument(f"--{name}", default=prompt, metavar="TEXT", help=f"a prompt (default: {shown!r})")
    args = parser.parse_args(argv)
    with interpose.connect(args.address) as client:
        model = client.model(args.model)
        try:
            found = run(model, **{name: getattr(args, name) for name in prompts or {}})
        except NoExperiment as refusal:
            sys.exit(f"{parser.prog}: {refusal}")
        draw(model, found, args.picture)
    print("picture:", args.picture)


def encode(model: Any, text: str) -> list[int]:
    """Return a prompt's token ids, with special tokens, from the model's own tokenizer."""
    encoded = model.tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))  # the package `tokenizers` gives an object that has them


def special_ids(model: Any) -> set[int]:
    """Return the ids that are no text: the begin of a sequence, its end, roles of a chat …"""
    tokenizer = model.tokenizer
    if hasattr(tokenizer, "all_special_ids"):
        return set(tokenizer.all_special_ids)
    return {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def decode(model: Any, token: int) -> str:
    """Return a token's text."""
    return str(model.tokenizer.decode([int(token)], skip_special_tokens=False))


def labels_of(model: Any, ids: Sequence[int]) -> list[str]:
    """Return each token's text as a label."""
    return [pictures.shown(decode(model, token)) for token in ids]


def layer_at(model: Any, depth: float) -> int:
    """Return the layer at a depth between 0, the first, and 1, after the last."""
    return min(int(depth * len(model.blocks)), len(model.blocks) - 1)


def difference_of_means(model: Any, layer: int, towards: Sequence[str], away: Sequence[str]) -> Any:
    """Return the difference of two sets of prompts in the mean activation after a layer.

    Args:
        model: the served model.
        layer: the layer after which the residual stream is read, at the last token.
        towards, away: the two sets of prompts.

    Returns:
        The mean over `towards` minus the mean over `away`, float32 [hidden].
    """
    with model.trace(max_tokens=1) as tracer:
        last = [[], []].save()
        for which, prompts in enumerate((towards, away)):
            for prompt in prompts:
                with tracer.invoke(prompt):
                    last[which].append(model.blocks[layer].resid_post[-1].float())
    one, other = (sum(activations) / len(activations) for activations in last)
    return one - other


def as_array(values: Any) -> np.ndarray:
    """Return nested lists or arrays of any library and dtype as one array, float64 [...]."""
    if hasattr(values, "detach"):  # torch's; numpy knows no bfloat16
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
