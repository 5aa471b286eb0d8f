"""The modes that torch keeps for each thread: what the system does in a block is not to run in the block's own."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def unseen() -> AbstractContextManager[object]:
    """A context for the system's own work in a block: on a GPU the block's default device is a torch function mode, which
    torch asks at every use of a tensor, even of an attribute."""
    disabled: AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return disabled


def mode_depth() -> tuple[int, int, bool, bool]:
    """Return how many modes are open on this thread: of functions, of dispatch, and whether autocast is on, on CPUs and GPUs."""
    return (
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )
