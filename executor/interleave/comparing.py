"""What this rank says in the machine's comparisons, and what all ranks say."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from executor.block.fingerprint import fingerprint
from executor.block.mediator import Mediator
from executor.interleave.context import Host
from executor.interleave.machine.events import Compared
from executor.interleave.machine.instructions import Compare, CompareAdmitted, CompareWritten, Instruction


class Comparing:
    """Carries out the comparisons of one worker.

    Args:
        mediators: the blocks, by key.
        host: the worker.
    """

    def __init__(self, mediators: Mapping[str, Mediator], host: Host) -> None:
        self._mediators = mediators
        self._ranks = host.ranks
        self._budget = host.budget

    def handlers(self) -> dict[type[Instruction], Callable[[Any], Any]]:
        """Return what carries out each instruction, by its type."""
        return {
            Compare: self._compare,
            CompareWritten: self._compare_written,
            CompareAdmitted: lambda do: Compared(self._ranks.compare(list(do.here))),
        }

    def _compare(self, do: Compare) -> Compared:
        mediators = [self._mediators[key] for key in do.blocks]
        ways = [fingerprint(mediator.state) for mediator in mediators]
        overdue = [int(mediator.state.progress.used > self._budget.step_seconds) for mediator in mediators]
        away = [mediator.state.waits.away_as if mediator.state.waits.away else 0 for mediator in mediators]
        return Compared(self._ranks.compare(ways + overdue + away))

    def _compare_written(self, do: CompareWritten) -> Compared:
        written = [_written_by(self._mediators[key]) for key in do.blocks]
        return Compared(self._ranks.compare([*do.spoilt, *written]))


def _written_by(mediator: Mediator) -> int:
    """Return a number that stands for all that a block wrote in this step; waits for devices."""
    written = [int(one) for one in mediator.state.record.wrote]
    mediator.state.record.wrote.clear()
    return zlib.crc32(repr(written).encode()) if written else 0
