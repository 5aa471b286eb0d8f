"""Has blocks run on the device's stream that the step computes on, wherever the model calls the module that they wait for.

Parts of some models run on a stream of their own beside the step's: shared experts, projections of attention. What a module
computes there is ready on that stream only, and a block's tensors would be made on one stream and used on another, which
nobody has waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class StepStream:
    """The stream of the step that is running.

    Args:
        device: where the model computes; a CPU has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def begin(self) -> None:
        """A step begins, on the stream that is the current one."""
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    def visit(self, do: Callable[[], Any]) -> Any:
        """Return what `do` returns; it runs on the step's stream, after the current one and before what follows there."""
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
        ):  # memory of the step's stream, which must not be used again before this one is done
            tensor.record_stream(current)
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
