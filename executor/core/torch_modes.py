"""The modes that torch keeps for each thread: the system's own code leaves a block's modes."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def unseen() -> AbstractContextManager[object]:
    """Return a context in which the system's own work does not see a block's torch modes.

    On a GPU the block's default device is a torch function mode. Torch calls that mode at every use of a tensor, and even at
    the use of an attribute.
    """
    disabled: AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return disabled


_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_any_autocast = torch._C._is_any_autocast_enabled


def mode_depth() -> tuple[int, int, bool]:
    """Return which modes are open on this thread.

    Returns:
        The number of function modes, the number of dispatch modes, and whether autocast is on for any device.
    """
    return _function_modes(), _dispatch_modes(), _any_autocast()
