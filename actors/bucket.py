"""An amount that refills with time: a quota per minute."""

from __future__ import annotations

from collections.abc import Callable

_MINUTE = 60.0


class Bucket:
    """What is left of a quota per minute, which is also the most that can be left.

    Less than nothing is left where a trace has used more than was known before.

    Args:
        per_minute: the quota; None is no limit.
        clock: returns seconds on a monotonic clock.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute or 0)
        self._at = clock()

    def limit(self, per_minute: int | None) -> None:
        """Set the quota from now on; what is used stays used."""
        if per_minute == self._per_minute:
            return
        used = self.used
        self._per_minute = per_minute
        self._left = (per_minute or 0) - used
        self._at = self._clock()

    @property
    def left(self) -> float:
        """What is left now; infinite without a limit."""
        if self._per_minute is None:
            return float("inf")
        now = self._clock()
        self._left = min(self._per_minute, self._left + (now - self._at) * self._per_minute / _MINUTE)
        self._at = now
        return self._left

    @property
    def used(self) -> float:
        """What is missing of a full bucket; 0 without a limit."""
        return 0.0 if self._per_minute is None else self._per_minute - self.left

    def take(self, amount: float) -> None:
        """Take an amount, or give it back if it is negative."""
        if self._per_minute is not None:
            self._left = min(self._per_minute, self.left - amount)

    def seconds_until(self, amount: float) -> float:
        """Return the seconds until so much is left, if nothing is taken in the meantime.

        Args:
            amount: at most the quota.
        """
        if self._per_minute is None:
            return 0.0
        return max(0.0, (amount - self.left) * _MINUTE / self._per_minute)
