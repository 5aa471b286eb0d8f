"""A round: turns of several blocks, with nothing of the engine's between them.

What the engine's process is like between turns is the same for all turns of a round. It is read once, when the round begins, and
every turn leaves the process as it found it. Torch's inference mode and default device are set once for the round.
"""

from __future__ import annotations

from typing import Any

import torch

from executor.block.process_state import State, now


class Round:
    """The round of a worker that is open, if a round is.

    Attributes:
        open: whether a round is open.
        outside: the state of the process between the turns of the open round, as of `executor.block.process_state.TURN`.
    """

    def __init__(self) -> None:
        self.open = False
        self.outside: State = ()
        self._contexts: list[Any] = []

    def begin(self, device: torch.device) -> None:
        """Open a round of blocks whose new tensors are made on a device."""
        self.enter(torch._C._InferenceMode(False))
        torch._C._set_grad_enabled(False)
        if device.type != "cpu":
            self.enter(device)
        self.outside = now()
        self.open = True

    def enter(self, context: Any) -> None:
        """Enter a context that is left at the end of the round."""
        context.__enter__()
        self._contexts.append(context)

    def end(self) -> None:
        """Close the round."""
        self.open = False
        self.outside = ()
        while self._contexts:
            self._contexts.pop().__exit__(None, None, None)
