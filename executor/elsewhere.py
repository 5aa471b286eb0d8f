"""A module that another pipeline stage has, as far as blocks here must know it."""

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
