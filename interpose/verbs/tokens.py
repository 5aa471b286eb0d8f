"""Prompts and tokens of a served model, its layers by depth, and values as arrays of numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from interpose.contract.errors import InvalidArgument

Prompt = str | Sequence[int]


def encode(model: Any, prompt: Any) -> list[int]:
    """Return a prompt's token ids: of a text with special tokens, by the model's own tokenizer.

    Raises:
        InvalidArgument: the prompt has no tokens.
    """
    if isinstance(prompt, str):
        encoded = model.tokenizer.encode(prompt)
        prompt = getattr(encoded, "ids", encoded)  # the package `tokenizers` gives an object that has them
    ids = [int(token) for token in prompt]
    if not ids:
        raise InvalidArgument("the prompt has no tokens; give a text or token ids")
    return ids


def prompts_of(prompts: Any) -> list[Any]:
    """Return the prompts, where one prompt may stand for a list of one.

    Raises:
        InvalidArgument: there is no prompt.
    """
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        return [prompts]
    if not len(prompts):
        raise InvalidArgument("there is no prompt; give a text, or several")
    return list(prompts)


def escaped(text: str) -> str:
    r"""Return a text with its unprintable characters as escapes: a new line is `\n`."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text.replace("\\", "\\\\"))


def decode(model: Any, token: int) -> str:
    """Return a token's text, with escapes."""
    return escaped(str(model.tokenizer.decode([int(token)], skip_special_tokens=False)))


def texts(model: Any, ids: Any) -> tuple[str, ...]:
    """Return the text of each token, with escapes."""
    known: dict[int, str] = {}
    return tuple(known.setdefault(int(token), decode(model, token)) for token in ids)


def layer_at(model: Any, depth: float) -> int:
    """Return the layer at a depth between 0, the first, and 1, after the last."""
    return min(int(depth * len(model.blocks)), len(model.blocks) - 1)


def layer_of(model: Any, layer: int | None) -> int:
    """Return a layer's number from 0; None is the layer in the middle, -1 the last layer.

    Raises:
        InvalidArgument: the model has no such layer.
    """
    count = len(model.blocks)
    if layer is None:
        return layer_at(model, 0.5)
    if not -count <= layer < count:
        raise InvalidArgument(f"layer={layer}: the model has {count} layers, from 0 to {count - 1}")
    return layer % count


def as_array(values: Any) -> np.ndarray:
    """Return nested lists or arrays of any library and dtype as one array, float64 [...]."""
    if hasattr(values, "detach"):  # torch's; numpy knows no bfloat16
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def vector_of(values: Any, width: int | None = None) -> np.ndarray:
    """Return a direction as an array that travels to the engine, float32 [width].

    Raises:
        InvalidArgument: it is no vector of finite numbers, or of another width.
    """
    vector = as_array(values).astype(np.float32)
    if vector.ndim != 1 or not np.isfinite(vector).all():
        raise InvalidArgument(f"a direction is a vector of finite numbers, [width], and this is {list(vector.shape)}")
    if width is not None and len(vector) != width:
        raise InvalidArgument(f"the direction has {len(vector)} numbers and the residual stream has {width}")
    return vector
