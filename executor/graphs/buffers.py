"""The values that taps read, on their way to the host.

There is one copy for all requests in each step, and one gather for each request at its end.

After a step's replay the used part of the output is copied to page-locked memory of the host, on a stream of its own. The copies
of consecutive steps that have the same shares lie one after the other in a run, [steps, elements], so that nothing is sorted in a
step. A request's part of a run is some columns of it. At its end a request gathers its parts of all runs.

Page-locked memory is bounded. When it is used up, the parts of the oldest run move to ordinary memory, where each request has its
own part alone. A worker that has not enough ordinary memory for what a request will read refuses it before it joins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from executor.graphs.emitted import unpacked
from executor.graphs.tables import LATER, PROMPT, Outgoing, Part, Share, Tables


class Ticket(Protocol):
    """Work that a device was given."""

    def done(self) -> bool:
        """Return whether it is over."""

    def wait(self) -> None:
        """Wait until it is over."""


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


@dataclass(frozen=True)
class Piece:
    """What a request read in some consecutive steps.

    Attributes:
        share: what lies in `values`.
        values: [steps, elements of the share].
    """

    share: Share
    values: torch.Tensor


@dataclass(eq=False)
class _Run:
    """Copies of consecutive steps with the same shares.

    Attributes:
        block: the memory that it is in.
        lines: [most steps, elements].
        version: of the shares.
        shares: by the requests' keys, without the requests that are over.
        count: the steps so far.
        ticket: of the last copy.
    """

    block: torch.Tensor
    lines: torch.Tensor
    version: int
    shares: dict[str, Share]
    count: int = 0
    ticket: Ticket = field(default_factory=Done)

    def piece(self, key: str) -> Piece:
        share = self.shares[key]
        return Piece(share, self.lines[: self.count, share.start : share.start + share.size])


class Delivery:
    """The copies of one area of the output.

    Args:
        source: the area, [elements].
        copier: copies.
        block: the elements of a block of page-locked memory; at least those of the area.
        blocks: the most blocks.
        host: makes a block, [elements].
    """

    def __init__(
        self, source: torch.Tensor, copier: Copier, block: int, blocks: int, host: Callable[[int], torch.Tensor]
    ) -> None:
        if block < source.numel() or blocks < 1:
            raise ValueError(f"{blocks} blocks of {block} elements for an area of {source.numel()}")
        self._source = source
        self._copier = copier
        self._block = block
        self._left = blocks
        self._host = host
        self._free: list[torch.Tensor] = []
        self._runs: deque[_Run] = deque()
        self._moved: dict[str, list[Piece]] = {}
        self._open = False

    def after(self, outgoing: Outgoing, keys: Mapping[int, str]) -> None:
        """Copy what a step leaves; called when the step was given to the device.

        Args:
            outgoing: of the step.
            keys: the request of each slot.
        """
        if not outgoing.shares:
            return
        run = self._runs[-1] if self._open and self._runs else None
        if run is None or run.version != outgoing.version or run.count == len(run.lines):
            block = self._take()
            lines = block[: self._block // outgoing.top * outgoing.top].view(-1, outgoing.top)
            run = _Run(block, lines, outgoing.version, {keys[slot]: share for slot, share in outgoing.shares.items()})
            self._runs.append(run)
            self._open = True
        run.ticket = self._copier.copy(run.lines[run.count], self._source[: outgoing.top])
        run.count += 1

    def _take(self) -> torch.Tensor:  # [elements]
        if not self._free and self._left:
            self._left -= 1
            return self._host(self._block)
        while not self._free:
            run = self._runs.popleft()
            run.ticket.wait()
            for key in run.shares:
                piece = run.piece(key)
                self._moved.setdefault(key, []).append(Piece(piece.share, piece.values.clone()))
            self._free.append(run.block)
        return self._free.pop()

    def collect(self, key: str) -> list[Piece]:
        """Wait for the copies of a request, forget it, and return its own pieces."""
        pieces = self._moved.pop(key, [])
        for run in [one for one in self._runs if key in one.shares]:
            run.ticket.wait()
            piece = run.piece(key)
            pieces.append(Piece(piece.share, piece.values.clone()))
            self._forget(run, key)
        return pieces

    def drop(self, key: str) -> None:
        """Forget a request."""
        self._moved.pop(key, None)
        for run in [one for one in self._runs if key in one.shares]:
            self._forget(run, key)

    def _forget(self, run: _Run, key: str) -> None:
        del run.shares[key]
        if run.shares:
            return
        if run is self._runs[-1]:
            self._open = False
        run.ticket.wait()  # or the copy would be written into memory that has another owner
        self._runs.remove(run)
        self._free.append(run.block)

    @property
    def idle(self) -> bool:
        """Whether no request has anything here."""
        return not self._runs and not self._moved


class Collected:
    """All that a request read, step by step.

    Args:
        pieces: in the order of the steps.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = tuple(pieces)

    def steps_of(self, tap: int) -> list[torch.Tensor]:
        """Return what a tap read: a tensor [rows, columns] for each step in which it was open.

        A value of a program has its own shape and dtype.
        """
        return [one for values in self._values(tap) for one in values.unbind(0)]

    def stacked(self, tap: int, most: int | None = None) -> torch.Tensor | None:
        """Return the values of a tap as one tensor, [steps, rows, columns].

        It is None if the steps have several shapes, or if there is no step.

        Args:
            most: the steps to return; the engine runs a step more than a result has tokens.
        """
        found = self._values(tap)
        if len({one.shape[1:] for one in found}) != 1:
            return None
        return torch.cat(found)[:most]

    def _values(self, tap: int) -> list[torch.Tensor]:  # [steps, rows, columns] of each piece
        return [
            _value(piece.values[:, part.at : part.at + part.rows * part.width], part)
            for piece in self._pieces
            for part in piece.share.parts
            if part.tap == tap
        ]


def _value(lines: torch.Tensor, part: Part) -> torch.Tensor:  # [steps, elements] -> [steps, ...]
    return lines.unflatten(1, (part.rows, part.width)) if part.form is None else unpacked(lines, *part.form)


class Outputs:
    """What the taps of one worker's requests read.

    Args:
        tables: whose output it is.
        copier: copies.
        host_bytes: the most page-locked memory.
    """

    def __init__(self, tables: Tables, copier: Copier, host_bytes: int) -> None:
        output = tables.output
        self._copier = copier
        areas = output[: tables.split], output[tables.split : tables.scratch]
        pinned = output.device.type == "cuda"

        def host(elements: int) -> torch.Tensor:  # [elements]
            return torch.empty(elements, dtype=output.dtype, pin_memory=pinned)

        half = host_bytes // output.itemsize // 2
        self._areas = tuple(
            Delivery(area, copier, area.numel(), max(1, half // max(1, area.numel())), host) for area in areas
        )

    def before(self) -> None:
        """Call before a step is given to the device."""
        self._copier.before()

    def after(self, outgoing: tuple[Outgoing, Outgoing], keys: Mapping[int, str]) -> None:
        """Note that a step was given to the device.

        The arguments are those of `Delivery.after`, for both areas.
        """
        for delivery, one in zip(self._areas, outgoing, strict=True):
            delivery.after(one, keys)

    def collect(self, key: str) -> Collected:
        """Wait for the copies of a request that is over; return what it read."""
        return Collected([*self._areas[PROMPT].collect(key), *self._areas[LATER].collect(key)])

    def drop(self, key: str) -> None:
        """Forget a request."""
        for delivery in self._areas:
            delivery.drop(key)

    @property
    def idle(self) -> bool:
        """Whether no request has anything here."""
        return all(delivery.idle for delivery in self._areas)
