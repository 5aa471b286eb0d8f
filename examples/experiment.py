"""Parts that the experiments' commands share: the command line, and the special tokens."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import interpose


def plot(found: Any, picture: Path) -> None:
    """Write the picture that a result has."""
    found.plot(picture)


def main(
    doc: str | None,
    run: Callable[..., Any],
    picture: str,
    prompts: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
    draw: Callable[[Any, Path], None] = plot,
) -> None:
    """Connect, run one experiment on the served model, and draw what it found.

    Args:
        doc: the experiment's docstring; its first line is the command's description.
        run: the experiment; gets the model, and each prompt under its name.
        picture: the file's name unless the command line gives one.
        prompts: the experiment's prompts; each can be given on the command line under its name.
        argv: the command line, without the program.
        draw: gets what `run` returned, and the file to write.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--address", default="localhost:9000", help="of the service")
    parser.add_argument("--model", help="name of the served model, if there are several")
    parser.add_argument("--picture", type=Path, default=Path(picture), help="the file to write: PNG, SVG or PDF")
    for name, prompt in (prompts or {}).items():
        shown = prompt.replace("%", "%%")
        parser.add_argument(f"--{name}", default=prompt, metavar="TEXT", help=f"a prompt (default: {shown!r})")
    args = parser.parse_args(argv)
    with interpose.connect(args.address) as client:
        model = client.model(args.model)
        try:
            found = run(model, **{name: getattr(args, name) for name in prompts or {}})
        except interpose.InvalidArgument as refusal:
            options = " and ".join(f"--{name}" for name in prompts or {})
            sys.exit(f"{parser.prog}: {refusal}" + (options and f"\nPrompts are given with {options}."))
        draw(found, args.picture)
    print("picture:", args.picture)


def special_ids(model: Any) -> set[int]:
    """Return the ids that are no text: the begin of a sequence, its end, roles of a chat …"""
    tokenizer = model.tokenizer
    if hasattr(tokenizer, "all_special_ids"):
        return set(tokenizer.all_special_ids)
    return {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
