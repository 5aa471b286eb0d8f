"""The values that taps read in later steps, from the ring on the device to the requests.

A part of the ring that is full goes to page-locked memory. A thread waits for that copy, and moves the lines of each request to
the request's own memory (`lines`), while the engine goes on. So when a request is over, only the steps since the last copy are
left to be moved, and page-locked memory is used again at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from executor.graphs.lines import Lines, units_of
from executor.graphs.pieces import Piece
from executor.graphs.ring import Ring
from executor.graphs.shares import Outgoing, Share
from executor.graphs.tickets import Copier, Done, Ticket

_PARTS = 4  # of a half of the ring, each of which goes to the host when it is full


@dataclass(eq=False)
class _Block:
    """Page-locked memory for one filling of half of the ring.

    Attributes:
        memory: [elements of a half].
        moved: done when the last lines have left it; None: nothing has been in it.
    """

    memory: torch.Tensor
    moved: Future[None] | None = None


@dataclass(eq=False)
class _Stretch:
    """Consecutive steps in the ring that have the same shares, and have not gone to the host.

    Attributes:
        start, top: where it begins in the half, and the elements of a step.
        version: of the shares.
        shares: the requests' memory, and where their elements are in a step.
        count: the steps so far.
    """

    start: int
    top: int
    version: int
    shares: list[tuple[Lines, Share]]
    count: int = 0


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
        self._most = blocks
        self._host = host
        self._blocks = deque(_Block(host(ring.half)) for _ in range(2))  # the last used at the end
        self._mover: ThreadPoolExecutor | None = None
        self._lines: dict[str, list[Lines]] = {}
        self._waiting: list[_Stretch] = []  # the last is still open if it has the version of the last step
        self._tickets: list[Ticket] = [Done(), Done()]
        self._which = 0
        self._at = self._copied = 0  # in the half: where the next step goes, and what is on its way to the host
        self._block: _Block | None = None
        self._placed: tuple[int, int] | None = None  # the version and top that the device was told last

    def before(self, outgoing: Outgoing) -> None:
        """Make room for a step, before it is given to the device."""
        if self._at + outgoing.top > self._ring.half:
            self._turn()
        elif self._room(outgoing.top) < 1:
            self._flush()
        if self._placed != (outgoing.version, outgoing.top):
            self._ring.place(self._which * self._ring.half + self._at, outgoing.top)
            self._placed = (outgoing.version, outgoing.top)

    def _room(self, top: int) -> int:
        """Return how many steps of so many elements may come before the next copy."""
        end = min(self._ring.half, self._copied + max(top, self._ring.half // _PARTS))
        return (end - self._at) // top if top else 1 << 30

    def _turn(self) -> None:
        """Go on in the other half."""
        self._flush()
        self._block = None
        self._which, self._at, self._copied, self._placed = 1 - self._which, 0, 0, None
        self._tickets[self._which].hold()

    def after(self, outgoing: Outgoing, keys: Mapping[int, str]) -> None:
        """Note that a step was given to the device; as of `Delivery.after`."""
        if not outgoing.shares:
            return
        run = self._waiting[-1] if self._waiting else None
        if run is None or run.version != outgoing.version or run.start + run.count * run.top != self._at:
            shares = [(self._lines_of(keys[slot], share), share) for slot, share in outgoing.shares.items()]
            run = _Stretch(self._at, outgoing.top, outgoing.version, shares)
            self._waiting.append(run)
        run.count += 1
        self._at += outgoing.top

    def _lines_of(self, key: str, share: Share) -> Lines:
        """Return the memory for a request's next steps."""
        mine = self._lines.setdefault(key, [])
        if not mine or not mine[-1].goes_on(share):
            mine.append(Lines(share, self._ring.memory.dtype))
        return mine[-1]

    def room(self, outgoing: Outgoing) -> int:
        """Return how many steps like the last one need nothing but `repeat`."""
        if not outgoing.shares:
            return 1 << 30
        if not self._waiting or self._waiting[-1].version != outgoing.version:
            return 0
        return max(0, self._room(outgoing.top))

    def repeat(self, steps: int) -> None:
        """Note that so many steps like the last one were given to the device."""
        if steps and self._placed is not None and self._placed[1]:
            run = self._waiting[-1]
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
        """Copy what has not been copied of the half to its block, and have it moved from there."""
        begin, end = self._copied, self._at
        if not self._waiting or begin == end:
            return
        block = self._block = self._block or self._take()
        base = self._which * self._ring.half
        ticket = self._copier.copy(block.memory[begin:end], self._ring.memory[base + begin : base + end])
        self._tickets[self._which], self._copied = ticket, end
        if self._mover is None:
            self._mover = ThreadPoolExecutor(1, thread_name_prefix="interpose-delivery")
        block.moved = self._mover.submit(_move, block.memory, ticket, self._waiting)
        self._waiting = []

    def _take(self) -> _Block:
        """Return a block that nothing is in."""
        if _is_full(self._blocks[0]) and len(self._blocks) < self._most:
            self._blocks.appendleft(_Block(self._host(self._ring.half)))
        block = self._blocks.popleft()
        self._blocks.append(block)
        if block.moved is not None:
            block.moved.result()
        return block

    def collect(self, key: str) -> list[Piece]:
        """Wait for the values of a request, forget it, and return its own pieces.

        Raises:
            Exception: the values could not be kept, for want of memory.
        """
        mine = self._lines.pop(key, [])
        if mine:
            self._flush()
            for block in self._blocks:
                if block.moved is not None:
                    block.moved.result()
        return [Piece(lines.share, lines.values()) for lines in mine]

    def drop(self, key: str) -> None:
        """Forget a request."""
        for lines in self._lines.pop(key, []):
            lines.dropped = True

    @property
    def idle(self) -> bool:
        """Whether no request has anything here."""
        return not self._lines

    def close(self) -> None:
        """End the thread."""
        if self._mover is not None:
            self._mover.shutdown()
            self._mover = None


def _is_full(block: _Block) -> bool:
    return block.moved is not None and not block.moved.done()


def _move(memory: torch.Tensor, ticket: Ticket, stretches: Sequence[_Stretch]) -> None:  # [elements]
    """Move the lines of stretches from a block to their requests, when they have come."""
    ticket.wait()
    block = units_of(memory)
    for run in stretches:
        for lines, share in run.shares:
            lines.add(block, run.start, run.count, run.top, share)
