"""A round: turns of several blocks, with nothing of the engine's between them.

What the engine's process is like between turns is the same for all turns of a round. It is read once, when the round begins, and
every turn leaves the process as it found it.
"""

from __future__ import annotations

from executor.block.process_state import State, now


class Round:
    """The round of a worker that is open, if a round is.

    Attributes:
        open: whether a round is open.
        outside: the state of the process between the turns of the open round, as of `executor.block.process_state.TURN`.
    """

    def __init__(self) -> None:
        self.open = False
        self.outside: State = ()

    def begin(self) -> None:
        """Open a round."""
        self.outside = now()
        self.open = True

    def end(self) -> None:
        """Close the round."""
        self.open = False
        self.outside = ()
