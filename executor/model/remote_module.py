"""A module that another pipeline stage has, as far as blocks here must know it; and what is known of a module on any stage."""

from __future__ import annotations

import torch

from interpose.v1 import model_pb2 as pb


class Elsewhere(torch.nn.Module):
    """Stands in the tree for a module of another stage; it is never run.

    Args:
        described: its description, by the stage that has it.
        attention: whether it holds attention.
    """

    def __init__(self, described: pb.Module, attention: bool) -> None:
        super().__init__()
        self.described = described
        self.attention = attention


def names_of(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's own parameters and buffers, without those that its class calls private."""
    if isinstance(module, Elsewhere):
        return [parameter.name for parameter in module.described.parameters]
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [name for name, _ in named if not name.startswith("_")]
