"""Activation patching: in which layer, and at which token, is the answer decided?

    python examples/activation_patching.py --address localhost:9000

Two prompts have the same number of tokens and differ in a few tokens. While the model reads the second prompt, one activation
is replaced by the first prompt's: the residual stream after one layer, at one position. The share of the first prompt's answer
that comes back says how much of the difference lies there. The runs are invokes of one trace, or of a few traces if the model
has many layers. So the first prompt's activations never leave the engine. (Meng et al., 2022)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import pictures

CLEAN = "The capital of Japan is"
CORRUPTED = "The capital of Italy is"
RUNS_AT_ONCE = 256  # patched runs in one trace


@dataclass(frozen=True)
class Patching:
    """The share of the answer that each patch brings back.

    Attributes:
        clean, corrupted: the prompts' token ids.
        answers: the token that each prompt leads to.
        share: [layers, positions]; 0: as without the patch, 1: as with the first prompt.
    """

    clean: list[int]
    corrupted: list[int]
    answers: tuple[int, int]
    share: np.ndarray


def encode_both(model: Any, clean: str, corrupted: str) -> tuple[list[int], list[int]]:
    """Return both prompts' token ids.

    Raises:
        NoExperiment: the prompts differ in length, or are the same.
    """
    one, other = experiment.encode(model, clean), experiment.encode(model, corrupted)
    if len(one) != len(other):
        spelled = "\n".join(f"  {len(ids):2} tokens: {experiment.labels_of(model, ids)}" for ids in (one, other))
        raise experiment.NoExperiment(
            f"the prompts must have the same number of tokens, so that each position has its counterpart:\n{spelled}\n"
            "Give prompts that this model's tokenizer splits alike with --clean and --corrupted."
        )
    if one == other:
        raise experiment.NoExperiment("the prompts are the same; give two that differ with --clean and --corrupted")
    return one, other


def run(model: Any, clean: str = CLEAN, corrupted: str = CORRUPTED) -> Patching:
    """Patch every layer and position.

    Raises:
        NoExperiment: the prompts do not go together, or lead to the same answer.
    """
    one, other = encode_both(model, clean, corrupted)
    layers, positions = len(model.blocks), len(one)
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        with tracer.invoke(one):
            right = model.logits.output[0].float().save()
        with tracer.invoke(other):
            wrong = model.logits.output[0].float().save()
    answers = int(right.argmax()), int(wrong.argmax())
    if answers[0] == answers[1]:
        raise experiment.NoExperiment(
            f"the model goes on with {experiment.decode(model, answers[0])!r} after both prompts, so there is no difference "
            "to restore; give prompts with different answers with --clean and --corrupted"
        )
    highest, lowest = (float(logits[answers[0]] - logits[answers[1]]) for logits in (right, wrong))

    differences = np.zeros((layers, positions))  # the logit of the first prompt's answer, less that of the second's
    at_once = max(1, RUNS_AT_ONCE // positions)
    for start in range(0, layers, at_once):
        chosen = list(range(start, min(start + at_once, layers)))
        found = _patched(model, one, other, chosen, answers)
        for (layer, position), difference in found.items():
            differences[layer, position] = difference
    return Patching(one, other, answers, (differences - lowest) / (highest - lowest))


def _patched(model: Any, clean: list[int], corrupted: list[int], layers: list[int], answers: tuple[int, int]) -> Any:
    """Patch each position of some layers.

    Returns:
        The difference of the two answers' logits, by (layer, position).
    """
    positions = len(clean)
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        differences = {}.save()
        with tracer.invoke(clean):
            stream = {layer: model.blocks[layer].resid_post.clone() for layer in layers}
        for layer in layers:
            for position in range(positions):
                with tracer.invoke(corrupted):
                    model.blocks[layer].resid_post[position] = stream[layer][position]
                    logits = model.logits.output[0].float()
                    differences[layer, position] = float(logits[answers[0]] - logits[answers[1]])
    return differences


def draw(model: Any, found: Patching, picture: Path) -> None:
    """Write the shares as a heat map of layers and positions."""
    pairs = zip(
        experiment.labels_of(model, found.clean), experiment.labels_of(model, found.corrupted), found.clean,
        found.corrupted, strict=True,
    )  # fmt: skip
    labels = [one if same == as_well else f"{one}\n→{other}" for one, other, same, as_well in pairs]
    first, second = experiment.labels_of(model, found.answers)
    cells = pictures.Cells.fit(*found.share.shape)
    figure, axis = pictures.table_figure(cells)
    rows = pictures.layer_labels(len(found.share))
    title = f"how much of “{first}” over “{second}” comes back"
    image = pictures.heat_map(axis, found.share, rows, labels, title, cells=cells)
    figure.colorbar(image, ax=axis, label="share restored", aspect=40)
    caption = "Each cell: the residual stream after that layer, at that token, was taken from the other prompt."
    pictures.save(figure, caption, picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "activation-patching.png", {"clean": CLEAN, "corrupted": CORRUPTED})
