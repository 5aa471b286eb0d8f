"""Keeps what taps read in many steps on the device.

So a step copies nothing to the host. At the end of a step, on the device, the used part of the output is appended to a ring of
two halves. A half that is full goes to the host in one copy, on a stream of its own, while steps fill the other half. Where a
step's values lie is known on the host without a look at the device: the host counts the steps that it gives to the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Appends `output[:top]` to the ring at `base`, and adds `top` to `base`. `state` is [base, top], int64.
Append = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def append_on(device: torch.device) -> Append:
    """Return what appends on a device: a kernel on CUDA, torch elsewhere."""
    if device.type == "cuda":
        from executor.graphs import kernel

        return kernel.append
    return append


def append(output: torch.Tensor, ring: torch.Tensor, state: torch.Tensor) -> None:
    """Append the used part of an output to a ring, on the host.

    Args:
        output: [elements of a step].
        ring: [elements].
        state: [2], int64: where the next values go, and how many elements are used.
    """
    base, top = state.tolist()
    ring[base : base + top] = output[:top]
    state[0] = base + top


class Ring:
    """The device's part: the memory, and where the next step goes.

    Args:
        source: the output of a step, [elements].
        half: the elements of a half, at least those of `source`.

    Attributes:
        half: as given.
        memory: [2 * half].
    """

    def __init__(self, source: torch.Tensor, half: int) -> None:
        if half < source.numel():
            raise ValueError(f"a half of {half} elements for an output of {source.numel()}")
        self.half = half
        with torch.inference_mode(False):
            self.memory = torch.zeros(2 * half, dtype=source.dtype, device=source.device)
            self._state = torch.zeros(2, dtype=torch.int64, device=source.device)
        self._source = source
        self._append = append_on(source.device)

    def append(self) -> None:
        """Append what the step has read; the launch can be captured."""
        self._append(self._source, self.memory, self._state)

    @property
    def last(self) -> torch.Tensor:  # [0 dimensions]
        """Where the step lies that was appended last: int64, on the device."""
        return self._state[0] - self._state[1]

    def place(self, base: int, top: int) -> None:
        """Say where the next step goes, and how many elements of the output it uses."""
        source = torch.tensor([base, top])
        if self._state.device.type == "cuda":
            source = source.pin_memory()
        self._state.copy_(source, non_blocking=True)
