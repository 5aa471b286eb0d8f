"""A block's fiber: a greenlet that takes strict turns with the forward, on the same thread.

A switch costs a microsecond and nothing needs a lock. Torch keeps its modes by thread, so a fiber carries its own: they
are the block's while it runs and the engine's otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from executor.block.interface import Block
from executor.core.errors import Cancel, Refusal
from executor.core.torch_modes import mode_depth
from interpose.v1 import trace_pb2 as pb

# Torch looks up once, when a default device is first used, which functions make tensors. Transformers puts another torch.linspace
# in the place of torch's while it makes a model: were that the first use, blocks' own linspace would stay on the CPU.
with torch.device("cpu"):
    torch.empty(0)

_BACKTRACE = 65  # frames of C


class _Greenlet(greenlet):
    """A greenlet that knows its block."""

    block: Block | None


def running() -> Block | None:
    """Return the block that is running on this thread, if any."""
    current = getcurrent()
    return current.block if isinstance(current, _Greenlet) else None


def current() -> Block:
    """Return the block that is running.

    Raises:
        Refusal: the caller is not a block (a thread that a block started, say).
    """
    block = running()
    if block is None:
        raise Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT,
            "the model can be used only from the block itself, not from a thread that it started",
        )
    return block


def _above(main: Callable[..., None]) -> Callable[..., None]:
    """Return what runs `main` above as many frames of C as torch looks at.

    torch takes a backtrace of 65 frames for each of its errors. Below a greenlet's own frames lie frames of the engine that are
    no longer there, and a backtrace that came to them would end the worker with a segmentation fault.
    """
    for _ in range(_BACKTRACE):
        main = MethodType(main, ())
    return main


class Fiber:
    """Runs one block.

    Args:
        main: the block, from its beginning to its end.
        block: what `running` gives while it runs.
        device: where the model's values are.

    Attributes:
        parked: whether the block waits for the forward, and has not just switched to another greenlet.
        closing: whether the block is to end and may wait for nothing more.
    """

    def __init__(self, main: Callable[..., None], block: Block, device: torch.device) -> None:
        self._greenlet = _Greenlet(_above(main))
        self._greenlet.block = block
        self.parked = False
        self.closing = False
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._outside: Any = None  # the engine's greenlet, while the block runs
        self._inference = False
        self._grad = False
        with self._placed():
            self._modes = mode_depth()

    @property
    def alive(self) -> bool:
        """Whether it has begun and has not ended."""
        return bool(self._greenlet)

    @property
    def dead(self) -> bool:
        """Whether it has ended."""
        return self._greenlet.dead

    def is_running(self) -> bool:
        """Whether the code that runs now is the block's, in a greenlet of its own making maybe."""
        return self._outside is not None and getcurrent() is not self._outside

    # From outside.

    def switch(self, value: Any = None) -> None:
        """Let the block run until it parks or ends; `value` is what it parked for."""
        self._turn(self._greenlet.switch, value)

    def throw(self, error: BaseException) -> None:
        """Raise `error` where the block is parked, and let it run until it parks or ends."""
        self._turn(self._greenlet.throw, error)

    def _turn(self, turn: Callable[[Any], Any], value: Any) -> None:
        with torch._C._InferenceMode(self._inference):  # what torch.inference_mode opens
            if self._on_cpu:
                self._within(turn, value)
            else:
                with self._device:
                    self._within(turn, value)

    def _within(self, turn: Callable[[Any], Any], value: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        self._outside = getcurrent()
        try:
            turn(value)
        finally:
            self._outside = None
            if self._greenlet.dead:
                self._greenlet.block = None  # the two refer to each other, and would wait until Python collects cycles
            self._inference, self._grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def _placed(self) -> AbstractContextManager[object]:
        """Make the block's new tensors on the model's device, so that the block runs on any device."""
        return nullcontext() if self._on_cpu else self._device

    # From inside.

    def park(self, wanted: object) -> Any:
        """Let the forward go on; return what the block is resumed with.

        Raises:
            Cancel: the block is to end.
        """
        if self.closing:
            raise Cancel
        self.parked = True
        try:
            return self._greenlet.parent.switch(wanted)
        finally:
            self.parked = False

    def check_modes(self, wanted: object, where: object) -> None:
        """Refuse to park inside a torch mode that the block has opened.

        Args:
            wanted: what the block asks for, as the message names it.
            where: the location that the error is about.
        """
        if mode_depth() != self._modes:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{wanted} was asked for inside a torch mode (autocast, a default device, a function or dispatch mode), which "
                "would reach the model too; read the value first, then open the mode around your own computation",
                location=str(where),
            )


def run_as(block: Block, do: Callable[[], None]) -> None:
    """Run code in which the names of a block ask `block`, which makes nothing wait."""
    inside = _Greenlet(do)
    inside.block = block
    inside.switch()
