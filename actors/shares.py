"""What several parties have had of something for which they take turns.

Fair queueing as with deficits in a round, but smoother: the party that has had the least is next. A trace counts with what it
may need as soon as it starts, and with what it has needed when it has ended. A party that comes to others begins with what
they had before the traces that run now. So it is served first until it has caught up with these traces, and has no claim on
the time before.

After Demers, Keshav and Shenker, "Analysis and Simulation of a Fair Queueing Algorithm" (1989), and Shreedhar and Varghese,
"Efficient Fair Queueing using Deficit Round Robin" (1996).
"""

from __future__ import annotations

from collections import Counter, defaultdict

# Parties without a trace that are remembered before they are looked through.
_REMEMBERED = 1024


class Shares:
    """What the parties have had, by their names.

    A party is active while a trace of it waits or runs.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}  # with what its running traces may need
        self._open: defaultdict[str, float] = defaultdict(float)  # what the running traces may need
        self._active: Counter[str] = Counter()

    def enter(self, name: str) -> None:
        """Note that a trace of a party waits."""
        if not self._active:
            self._had.clear()
        if not self._active[name]:
            self._had[name] = max(self._had.get(name, 0.0), self._floor())
        self._active[name] += 1

    def leave(self, name: str) -> None:
        """Note that a trace of a party neither waits nor runs any more."""
        self._active[name] -= 1
        if self._active[name]:
            return
        del self._active[name]
        self._open.pop(name, None)
        if len(self._had) > _REMEMBERED + 2 * len(self._active):
            floor = self._floor()
            self._had = {one: had for one, had in self._had.items() if had > floor or one in self._active}

    def start(self, name: str, amount: float) -> None:
        """Note that a trace of a party starts, which may need so much."""
        self._had[name] += amount
        self._open[name] += amount

    def end(self, name: str, amount: float, used: float) -> None:
        """Note that a trace that had started has ended, and what it has used of its amount."""
        self._open[name] -= amount
        self._had[name] += used - amount

    def had(self, name: str) -> float:
        """Return what an active party has had."""
        return self._had[name]

    def _floor(self) -> float:
        """Return the least that an active party had before the traces that run now."""
        return min((self._had[name] - self._open.get(name, 0.0) for name in +self._active), default=0.0)
