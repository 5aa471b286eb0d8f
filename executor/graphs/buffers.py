"""The values that taps read, on their way to the host.

What a step reads is appended to a ring on the device (`executor.graphs.ring`). Parts of the ring are copied to page-locked memory
of the host, on a stream of its own, and a thread moves each request's part from there to the request's own memory
(`executor.graphs.later`). The values of consecutive steps that have the same shares lie one after the other in a run, [steps,
elements], so that nothing is sorted in a step. A request's part of a run is some columns of it. What is read of prompts is copied
after each step.

Page-locked memory is bounded. When the memory for prompts is used up, the parts of the oldest run move to ordinary memory, where
each request has its own part alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from executor.graphs.later import Later
from executor.graphs.pieces import Collected, Piece
from executor.graphs.ring import Ring
from executor.graphs.shares import Outgoing, Share
from executor.graphs.tables import LATER, PROMPT, Tables
from executor.graphs.tickets import Copier, Done, Ticket


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
    """The copies of the prompts' area of the output.

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


class Outputs:
    """What the taps of one worker's requests read.

    Args:
        tables: whose output it is.
        copier: copies.
        ring_bytes: of the ring on the device.
        host_bytes: the most page-locked memory.

    Attributes:
        ring: on the device.
    """

    def __init__(self, tables: Tables, copier: Copier, ring_bytes: int, host_bytes: int) -> None:
        output = tables.output
        self._copier = copier
        areas = output[: tables.split], output[tables.split : tables.scratch]
        pinned = output.device.type == "cuda"

        def host(elements: int) -> torch.Tensor:  # [elements]
            with torch.inference_mode(False):  # blocks get views of it
                return torch.empty(elements, dtype=output.dtype, pin_memory=pinned)

        half = host_bytes // output.itemsize // 2
        size = areas[PROMPT].numel()
        self._prompts = Delivery(areas[PROMPT], copier, size, max(1, half // max(1, size)), host)
        self.ring = Ring(areas[LATER], ring_bytes // output.itemsize // 2)
        self._later = Later(self.ring, copier, max(2, half // self.ring.half), host)

    def before(self, outgoing: tuple[Outgoing, Outgoing]) -> None:
        """Call before a step is given to the device."""
        self._later.before(outgoing[LATER])
        if outgoing[PROMPT].shares:
            self._copier.before()

    def after(self, outgoing: tuple[Outgoing, Outgoing], keys: Mapping[int, str]) -> None:
        """Note that a step was given to the device, with its `Ring.append`.

        The arguments are those of `Delivery.after`, for both areas.
        """
        self._later.after(outgoing[LATER], keys)
        self._prompts.after(outgoing[PROMPT], keys)

    def room(self, outgoing: tuple[Outgoing, Outgoing]) -> int:
        """Return how many steps like the last one need nothing before and after them but `repeat`."""
        return 0 if outgoing[PROMPT].shares else self._later.room(outgoing[LATER])

    def repeat(self, steps: int) -> None:
        """Note that so many steps like the last one were given to the device."""
        self._later.repeat(steps)

    def pause(self) -> None:
        """Have passes append nothing until the next `before`."""
        self._later.pause()

    def again(self) -> None:
        """Have the next pass append where the step that was given to the device last did."""
        self._later.again()

    def collect(self, key: str) -> Collected:
        """Wait for the copies of a request that is over; return what it read."""
        prompts = self._prompts.collect(key)
        return Collected([*prompts, *self._later.collect(key)], len(prompts))

    def drop(self, key: str) -> None:
        """Forget a request."""
        self._prompts.drop(key)
        self._later.drop(key)

    @property
    def idle(self) -> bool:
        """Whether no request has anything here."""
        return self._prompts.idle and self._later.idle

    def close(self) -> None:
        """End what runs beside the engine."""
        self._later.close()
