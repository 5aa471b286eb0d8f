"""The values that taps read in later steps, from the ring on the device to the requests.

Page-locked memory is bounded. When it is used up, the parts of the oldest block move to ordinary memory, where each request has
its own part alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from executor.graphs.pieces import Piece, gathered
from executor.graphs.ring import Ring
from executor.graphs.tables import Outgoing, Share
from executor.graphs.tickets import Copier, Done, Ticket


@dataclass(eq=False)
class _Block:
    """Page-locked memory for one filling of half of the ring.

    Attributes:
        memory: [elements of a half].
        runs: how many runs lie in it that a request still has a part of.
        ticket: of the last copy into it.
    """

    memory: torch.Tensor
    runs: int = 0
    ticket: Ticket = field(default_factory=Done)


@dataclass(eq=False)
class _Stretch:
    """Consecutive steps in a block that have the same shares.

    Attributes:
        block: where it lies.
        start, top: where it begins in the block, and the elements of a step.
        version: of the shares.
        shares: by the requests' keys, without the requests that are over.
        count: the steps so far.
    """

    block: _Block
    start: int
    top: int
    version: int
    shares: dict[str, Share]
    count: int = 0

    def piece(self, key: str) -> Piece:
        share = self.shares[key]
        lines = self.block.memory[self.start : self.start + self.count * self.top].view(self.count, self.top)
        return Piece(share, lines[:, share.start : share.start + share.size])


class Later:
    """What is read in later steps, from the ring to the requests.

    Size: the state of the ring, of its two halves and of the host's blocks.

    Args:
        ring: on the device.
        copier: copies.
        blocks: the most blocks of page-locked memory, at least two.
        host: makes a block, [elements].
    """

    def __init__(self, ring: Ring, copier: Copier, blocks: int, host: Callable[[int], torch.Tensor]) -> None:
        self._ring = ring
        self._copier = copier
        self._left = blocks
        self._host = host
        self._free: list[_Block] = []
        self._runs: deque[_Stretch] = deque()
        self._moved: dict[str, list[Piece]] = {}
        self._tickets: list[Ticket] = [Done(), Done()]
        self._which = 0
        self._at = self._copied = 0  # in the half: where the next step goes, and what is on its way to the host
        self._block: _Block | None = None
        self._placed: tuple[int, int] | None = None  # the version and top that the device was told last

    def before(self, outgoing: Outgoing) -> None:
        """Make room for a step, before it is given to the device."""
        if self._at + outgoing.top > self._ring.half:
            self._turn()
        if self._placed != (outgoing.version, outgoing.top):
            self._ring.place(self._which * self._ring.half + self._at, outgoing.top)
            self._placed = (outgoing.version, outgoing.top)

    def _turn(self) -> None:
        """Go on in the other half."""
        self._flush()
        self._release()
        self._which, self._at, self._copied, self._placed = 1 - self._which, 0, 0, None
        self._tickets[self._which].hold()

    def after(self, outgoing: Outgoing, keys: Mapping[int, str]) -> None:
        """Note that a step was given to the device; as of `Delivery.after`."""
        if not outgoing.shares:
            return
        run = self._runs[-1] if self._runs else None
        open_here = run is not None and run.block is self._block and run.start + run.count * run.top == self._at
        if run is None or not open_here or run.version != outgoing.version:
            if self._block is None:
                self._block = self._take()
            shares = {keys[slot]: share for slot, share in outgoing.shares.items()}
            run = _Stretch(self._block, self._at, outgoing.top, outgoing.version, shares)
            self._block.runs += 1
            self._runs.append(run)
        run.count += 1
        self._at += outgoing.top

    def room(self, outgoing: Outgoing) -> int:
        """Return how many steps like the last one need nothing but `repeat`."""
        if not outgoing.shares:
            return 1 << 30
        run = self._runs[-1] if self._runs else None
        if run is None or run.block is not self._block or run.version != outgoing.version:
            return 0
        return (self._ring.half - self._at) // outgoing.top

    def repeat(self, steps: int) -> None:
        """Note that so many steps like the last one were given to the device."""
        if self._placed is not None and self._placed[1]:
            run = self._runs[-1]
            run.count += steps
            self._at += steps * run.top

    def pause(self) -> None:
        """Have passes append nothing until the next `before`."""
        self._ring.place(self._which * self._ring.half + self._at, 0)
        self._placed = None

    def again(self) -> None:
        """Have the next pass append where the last step did."""
        assert self._placed is not None
        self._ring.place(self._which * self._ring.half + self._at, self._placed[1])

    def _flush(self) -> None:
        """Copy what has not been copied of the half to its block."""
        block, begin, end = self._block, self._copied, self._at
        if block is None or begin == end:
            return
        base = self._which * self._ring.half
        block.ticket = self._copier.copy(block.memory[begin:end], self._ring.memory[base + begin : base + end])
        self._tickets[self._which], self._copied = block.ticket, end

    def _release(self) -> None:
        """Take the block of a half that is full away from it."""
        block, self._block = self._block, None
        if block is not None and not block.runs:
            self._give(block)

    def _give(self, block: _Block) -> None:
        block.ticket.wait()  # or the copy would be written into memory that has another owner
        self._free.append(block)

    def _take(self) -> _Block:
        if not self._free and self._left:
            self._left -= 1
            return _Block(self._host(self._ring.half))
        while not self._free:
            oldest = self._runs[0].block
            oldest.ticket.wait()
            while self._runs and self._runs[0].block is oldest:
                run = self._runs.popleft()
                for key in run.shares:
                    piece = run.piece(key)
                    self._moved.setdefault(key, []).append(Piece(piece.share, piece.values.clone()))
            oldest.runs = 0
            self._free.append(oldest)
        return self._free.pop()

    def collect(self, key: str) -> list[Piece]:
        """Wait for the values of a request, forget it, and return its own pieces."""
        pieces = self._moved.pop(key, [])
        mine = [run for run in self._runs if key in run.shares]
        if any(run.block is self._block for run in mine):
            self._flush()
        for run in mine:
            run.block.ticket.wait()
        pieces = gathered([*pieces, *(run.piece(key) for run in mine)])
        for run in mine:
            self._forget(run, key)
        return pieces

    def drop(self, key: str) -> None:
        """Forget a request."""
        self._moved.pop(key, None)
        for run in [run for run in self._runs if key in run.shares]:
            self._forget(run, key)

    def _forget(self, run: _Stretch, key: str) -> None:
        del run.shares[key]
        if run.shares:
            return
        self._runs.remove(run)
        run.block.runs -= 1
        if not run.block.runs and run.block is not self._block:
            self._give(run.block)

    @property
    def idle(self) -> bool:
        """Whether no request has anything here."""
        return not self._runs and not self._moved
