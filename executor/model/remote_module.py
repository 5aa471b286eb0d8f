"""A module that another pipeline stage has, as blocks on this stage know it."""

from __future__ import annotations

import torch

from interpose.v1 import model_pb2 as pb


class RemoteModule(torch.nn.Module):
    """Stands in the tree for a module of another stage; it is never run.

    Args:
        described: the module's description, from the stage that has the module.
        attention: whether the module holds attention.
    """

    def __init__(self, described: pb.Module, attention: bool) -> None:
        super().__init__()
        self.described = described
        self.attention = attention


def names_of(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's own parameters and buffers, without private names."""
    if isinstance(module, RemoteModule):
        return [parameter.name for parameter in module.described.parameters]
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [name for name, _ in named if not name.startswith("_")]
