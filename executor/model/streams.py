"""Runs blocks on the device's stream of the step, whatever stream the model uses.

Parts of some models run on a stream of their own beside the step's stream: shared experts, projections of attention. Their
results are ready on that stream only. Without this module a block's tensors would be made on one stream and used on another,
with no wait between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class StepStream:
    """The stream of the running step.

    Args:
        device: where the model computes; a CPU has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def begin(self) -> None:
        """Begin a step on the current stream."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    def visit(self, do: Callable[[], Any]) -> Any:
        """Return what `do` returns; run it on the step's stream.

        It runs after the present work of the current stream, and before the later work there.
        """
        if self._stream is None:
            return do()
        current = torch.cuda.current_stream(self._device)
        if current == self._stream:
            return do()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = do()
        current.wait_stream(self._stream)
        for tensor in _tensors(
            result
        ):  # memory of the step's stream, which must not reuse it before this stream is done
            tensor.record_stream(current)
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:  # any shape
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
