"""Copies to the host that go on beside the device's next work, and tickets to wait for them."""

from __future__ import annotations

from typing import Protocol

import torch


class Ticket(Protocol):
    """Work that a device was given."""

    def done(self) -> bool:
        """Return whether it is over."""

    def wait(self) -> None:
        """Wait until it is over."""

    def hold(self) -> None:
        """Keep what the device is given next from beginning before it is over."""


class Copier(Protocol):
    """Copies a step's output to the host beside the next step."""

    def before(self) -> None:
        """Keep the step that begins from writing into an output that is still being copied."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Copy [elements] to the host, after the step that was given to the device last."""


class Done:
    """A ticket for work that is over."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def hold(self) -> None:
        pass


class PlainCopier:
    """Copies at once, where the output is in the host's memory."""

    def before(self) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:  # [elements]
        target.copy_(source)
        return Done()


class Event:
    """A ticket that is an event of CUDA."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @classmethod
    def now(cls) -> Event:
        """Return a ticket for all work that the current stream was given."""
        event = torch.cuda.Event()
        event.record()
        return cls(event)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class SideStream:
    """Copies on a stream of its own, beside the next step.

    Args:
        device: of CUDA. The current stream of a call is the stream of the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._last: torch.cuda.Event | None = None

    def before(self) -> None:
        if self._last is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._last)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:  # [elements]
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event.record(self._stream)
        self._last = event
        return Event(event)


def copier_on(device: torch.device) -> Copier:
    """Return what copies the outputs of a device."""
    return SideStream(device) if device.type == "cuda" else PlainCopier()
