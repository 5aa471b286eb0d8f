"""Memory of one request that grows: a line of elements for each step.

The pages of the memory are the request's own. When the request is over they are its values, without another copy: the messages
that leave the worker are made of them.
"""

from __future__ import annotations

import contextlib
import mmap
import time

import numpy as np
import numpy.typing as npt
import torch

from executor.graphs.shares import Share

LEAST_BYTES = 64 << 10
_MORE_BYTES = 8 << 20  # by which memory grows at most at a time
_HUGE_BYTES = 4 << 20  # from here on, large pages save most of the time that new pages take
_PATIENCE_SECONDS = 20.0
_UNITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def units_of(memory: torch.Tensor) -> npt.NDArray[np.generic]:  # [elements]
    """Return the memory of a tensor on the host as numbers of the same size: [elements]."""
    raw: npt.NDArray[np.generic] = memory.detach().view(torch.uint8).numpy().view(_UNITS[memory.itemsize])
    return raw


class Lines:
    """What a request read in consecutive steps with the same parts.

    Args:
        share: of a step; its parts and its size are those of all steps.
        dtype: of the elements.

    Attributes:
        share: as given.
        count: the steps.
        dropped: whether nobody wants the steps any more.
        error: why steps are missing; None: none is.
    """

    def __init__(self, share: Share, dtype: torch.dtype) -> None:
        self.share = share
        self.count = 0
        self.dropped = False
        self.error: Exception | None = None
        self._dtype = dtype
        self._unit = np.dtype(_UNITS[dtype.itemsize])
        self._memory: mmap.mmap | None = None

    def goes_on(self, share: Share) -> bool:
        """Return whether a step with a share has the same parts."""
        return share.size == self.share.size and (share.parts is self.share.parts or share.parts == self.share.parts)

    def add(self, block: npt.NDArray[np.generic], start: int, count: int, top: int, share: Share) -> None:
        """Add the lines of some steps.

        Args:
            block: [elements], of the dtype's size.
            start: where the first step begins.
            count, top: the steps, and the elements of a step of all requests.
            share: the request's in each of these steps.
        """
        if self.dropped or self.error is not None:
            return
        try:
            size = self.share.size
            if size:
                memory = self._grown((self.count + count) * size * self._unit.itemsize)
                offset = self.count * size * self._unit.itemsize
                mine = np.frombuffer(memory, self._unit, count * size, offset).reshape(count, size)
                steps = block[start : start + count * top].reshape(count, top)
                np.copyto(mine, steps[:, share.start : share.start + size])
            self.count += count
        except Exception as error:  # there is no more memory
            self.error, self._memory = error, None

    def _grown(self, size: int) -> mmap.mmap:
        """Return memory of at least so many bytes, which begins with the lines so far.

        Nothing is copied. While a block runs, the process may have little address space left, because that is how the block is
        bounded. So this waits for more.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        while self._memory is None or len(self._memory) < size:
            try:
                if self._memory is None:
                    self._memory = mmap.mmap(-1, max(LEAST_BYTES, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                else:
                    had = len(self._memory)
                    self._memory.resize(max(size, min(2 * had, had + _MORE_BYTES)))
            except (OSError, MemoryError):
                if time.monotonic() > until:
                    raise
                time.sleep(_PATIENCE_SECONDS / 1000)
            else:
                if len(self._memory) >= _HUGE_BYTES:
                    with contextlib.suppress(OSError):  # the system has no large pages
                        self._memory.madvise(mmap.MADV_HUGEPAGE)
        return self._memory

    def values(self) -> torch.Tensor:
        """Return the lines, [steps, elements of the share].

        Raises:
            Exception: of `add`.
        """
        if self.error is not None:
            raise self.error
        size = self.share.size
        with torch.inference_mode(False):  # blocks get views of it
            if self._memory is None:
                return torch.empty(self.count, size, dtype=self._dtype)
            return torch.frombuffer(self._memory, dtype=self._dtype, count=self.count * size).view(self.count, size)
