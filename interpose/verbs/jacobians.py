"""Fits a Jacobian lens on a copy of the model in transformers, which has gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from interpose.contract.errors import InvalidArgument

NEEDED = (
    "fit_jacobian_lens needs torch and transformers, because an engine has no gradients: pip install torch transformers"
)
LISTS = ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers")


def fit_jacobian_lens(
    copy: Any, prompts: Sequence[Sequence[int]], *, layers: Sequence[int] | None = None
) -> dict[int, np.ndarray]:
    """Return the mean Jacobian of the last layer's stream with respect to each layer's stream.

    The mean is over the prompts, and in each prompt over all pairs of a token and the same or a later token: the derivative of
    the last layer's stream at the later token with respect to the layer's stream at the earlier token. Each prompt takes
    one forward and `width` backward passes.

    Args:
        copy: a causal language model of transformers, or the folder or name of a checkpoint to load in float32.
        prompts: token ids of each prompt.
        layers: the numbers of the layers; None: all layers.

    Returns:
        For each layer a matrix, float32 [width, width]. Row i is the derivative of number i of the last layer's stream.

    Raises:
        ImportError: torch or transformers is not installed.
        InvalidArgument: there is no prompt, or the model's layers are not found.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ImportError(NEEDED) from error
    if not len(prompts) or any(isinstance(ids, str) or not len(ids) for ids in prompts):
        raise InvalidArgument("prompts is a list of prompts, each a list of token ids, with at least one token")
    if isinstance(copy, str) or hasattr(copy, "__fspath__"):
        copy = transformers.AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
    modules = _layers_of(copy)
    chosen = sorted(range(len(modules)) if layers is None else {int(layer) for layer in layers})
    if not chosen or chosen[0] < 0 or chosen[-1] >= len(modules):
        raise InvalidArgument(f"layers={chosen}: the model has the layers 0 to {len(modules) - 1}")
    total: dict[int, Any] = {}
    for ids in prompts:
        streams = _streams(copy, modules, ids)
        pairs = len(ids) * (len(ids) + 1) / 2
        for layer, jacobian in _summed(streams, chosen).items():
            total[layer] = total.get(layer, 0) + jacobian / (pairs * len(prompts))
    return {layer: matrix.float().cpu().numpy() for layer, matrix in total.items()}


def _layers_of(copy: Any) -> Any:
    """Return the list of the model's layers."""
    for path in LISTS:
        found = copy
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    raise InvalidArgument(f"{type(copy).__name__} has its layers in none of {', '.join(LISTS)}")


def _streams(copy: Any, modules: Any, ids: Sequence[int]) -> list[Any]:
    """Return the residual stream after each layer with its graph, [1, tokens, width] each."""
    import torch

    found: list[Any] = []

    def keep(module: Any, args: Any, output: Any) -> Any:
        stream = output[0] if isinstance(output, tuple) else output
        if not stream.requires_grad:
            stream = stream.detach().requires_grad_()
        found.append(stream)
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    handles = [module.register_forward_hook(keep) for module in modules]
    try:
        with torch.enable_grad():
            copy(torch.tensor([list(ids)], device=next(copy.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _summed(streams: list[Any], layers: Sequence[int]) -> dict[int, Any]:
    """Return for each layer the Jacobians of all pairs of tokens, added up, [width, width]."""
    import torch

    last = streams[-1]
    rows: dict[int, list[Any]] = {layer: [] for layer in layers}
    for number in range(last.shape[-1]):
        gradients = torch.autograd.grad(
            last[..., number].sum(), [streams[layer] for layer in layers], retain_graph=True
        )
        for layer, gradient in zip(layers, gradients, strict=True):
            rows[layer].append(gradient.sum((0, 1)))
    return {layer: torch.stack(found) for layer, found in rows.items()}
