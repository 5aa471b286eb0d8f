"""Has all tensor-parallel ranks capture a graph in the same step, and keep it or not alike.

A graph of one rank adds up over the ranks with the graphs of the others, so it is of use only if every rank has it. A capture
itself waits for no other rank. When each rank has tried, the ranks exchange whether they could.

vLLM's kernel for sums over the ranks reads the memory of the other ranks. The addresses in a new graph are exchanged after the
capture, as vLLM does it for graphs of its own. If a rank could not capture, the addresses of this graph are never exchanged, and
the kernel could not tell later graphs' addresses from them. So later graphs take NCCL's sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from executor.parallel.agreement import Ranks

logger = init_logger(__name__)


class Captures:
    """What the ranks have in common of their captures.

    Args:
        ranks: the ranks that run the same blocks.
        communicator: what vLLM adds up over the ranks with; None: nothing does.
    """

    def __init__(self, ranks: Ranks, communicator: Any = None) -> None:
        self._ranks = ranks
        sums = getattr(communicator, "ca_comm", None)
        self._sums = None if sums is None or sums.disabled else sums
        self._exchanges = self._sums is not None

    @classmethod
    def of(cls, ranks: Ranks) -> Captures:
        """Return the captures of a worker."""
        return cls(ranks, get_tp_group().device_communicator if ranks.several else None)

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Return a context for a capture, and for the forward pass that warms it up.

        vLLM's kernel gives no sums in the warm-up, so that no rank waits there for another.
        """
        sums = self._sums
        if sums is None:
            yield
            return
        if self._exchanges:
            sums._IS_CAPTURING = True
        else:
            sums.disabled = True
        try:
            yield
        finally:
            sums._IS_CAPTURING = sums.disabled = False

    def kept(self, size: int | None) -> int | None:
        """Return the size of a graph if all ranks have captured it.

        All ranks call this after a capture. The size is that on the rank where it is largest.

        Args:
            size: the bytes of the graph on this rank; None if the capture failed.

        Returns:
            None if it failed anywhere. Then no rank may replay the graph.
        """
        sizes = [votes[0] for votes in self._ranks.compare([-1 if size is None else size])]
        good = min(sizes) >= 0
        if self._exchanges and self._sums is not None:
            try:
                if good:
                    self._sums.register_graph_buffers()
            except RuntimeError as error:  # the kernel has no room for more addresses, on any rank
                logger.warning("the addresses of a CUDA graph could not be exchanged: %s", error)
                good = False
            self._exchanges = good
        return max(sizes) if good else None

    def equal(self, mine: bool) -> bool:
        """Return whether a graph gave what hooks give on all ranks; all call this."""
        return all(votes[0] for votes in self._ranks.compare([int(mine)]))


def why_not_recorded(communicator: Any) -> str:
    """Return why sums over the ranks cannot be in graphs of ours, "" if they can."""
    others = ("fi_pcie_ipc_ar_comm", "aiter_ar_comm")
    found = next((name for name in others if getattr(communicator, name, None) is not None), "")
    return f"the ranks' sums are made by {found}" if found else ""
