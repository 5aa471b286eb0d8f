"""A location is a module's input or output by its vLLM name; a reference is what the truth is at each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Kind = Literal["input", "output"]
Sharding = Literal[
    "block",
    "attention",
    "mlp",
    "norm",
    "column-input",
    "column",
    "row-input",
    "row-output",
    "heads",
    "router",
    "embedding",
    "logits",
    "view",
]


@dataclass(frozen=True)
class Location:
    """One place whose value can be compared and edited.

    Attributes:
        path: the module's path in vLLM's model, or "logits".
        kind: "output", or "input" for the first positional argument.
        sharding: what part of the network it is, which says how tensor parallelism spreads it: "column" and "row-input"
            are cut on the last dimension, "heads" on the one before it, everything else is whole on every rank.
    """

    path: str
    kind: Kind
    sharding: Sharding

    def __str__(self) -> str:
        return f"{self.path}.{self.kind}"


@dataclass
class Edit:
    """A change of the value at one location.

    Attributes:
        path: the module's path in vLLM's model, or "logits".
        kind: "output" or "input".
        apply: gets a copy of the value in vLLM's layout, which it may change, and returns the value to go on with, of
            the same structure, shapes and dtypes.
        steps: the steps to do it in; None for every step.
        in_place: write the new value into the tensors that the model goes on with, instead of replacing them. That
            differs where the model holds the same tensor elsewhere: the input of a gpt2 block's norms and of the first
            llama `input_layernorm` is also what the block's residual connection adds to.
    """

    path: str
    kind: Kind
    apply: Callable[[Any], Any]
    steps: set[int] | None = None
    in_place: bool = False


@dataclass
class Reference:
    """What transformers computed.

    Attributes:
        tokens: the ids that were chosen, one a step.
        logits: what each was chosen from, after edits, each [1, vocab] float32.
        values: (vLLM path, kind, step) → the value on arrival: later edits of the same location are not in it, edits of
            earlier locations are. A copy, in vLLM's layout.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    values: dict[tuple[str, str, int], Any] = field(default_factory=dict)

    def value(self, path: str, kind: str = "output", step: int = 0) -> Any:
        """Return the value of one location in one step.

        Raises:
            KeyError: there is no such location or step.
        """
        return self.values[path, kind, step]


def copy_of(value: Any) -> Any:
    """Return the value with its tensors cloned."""
    if isinstance(value, tuple):
        return tuple(copy_of(item) for item in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def write_into(value: Any, new: Any) -> None:
    """Overwrite a value's tensors with those of another of the same layout."""
    if isinstance(value, tuple):
        for old_item, new_item in zip(value, new, strict=True):
            write_into(old_item, new_item)
    elif isinstance(value, torch.Tensor):
        value.copy_(new)


def layout_of(value: Any) -> object:
    """Return the value's structure, shapes and dtypes, comparable with `==`."""
    if isinstance(value, tuple):
        return tuple(layout_of(item) for item in value)
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def difference(actual: Any, expected: Any) -> float:
    """Return the largest absolute difference between two values of a location.

    Args:
        actual: a tensor, or a tuple or list of tensors and None.
        expected: the same, usually from a `Reference`.

    Raises:
        AssertionError: their structures or shapes differ, or one has a NaN.
    """
    if isinstance(expected, (tuple, list)):
        assert isinstance(actual, (tuple, list)), type(actual)
        assert len(actual) == len(expected), (len(actual), len(expected))
        return max(difference(a, e) for a, e in zip(actual, expected, strict=True))
    if not isinstance(expected, torch.Tensor):
        assert actual is expected, (actual, expected)
        return 0.0
    assert isinstance(actual, torch.Tensor), type(actual)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    largest = (actual.cpu().double() - expected.cpu().double()).abs().max().item()
    assert not math.isnan(largest), "one value has a NaN"
    return largest
