"""Engines that stay for the next file of tests that shares them, so that each need not start again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Shared = TypeVar("Shared")


class Kept:
    """The shared engines of this process, each under a name.

    They stay beside each other until another engine starts or closes: with an engine that closes, vLLM's groups of ranks are gone
    for all engines of the process.
    """

    def __init__(self) -> None:
        self._close: dict[str, Callable[[], None]] = {}
        self._there: dict[str, object] = {}
        self._others = 0
        self._starts = False

    def make_way(self) -> None:
        """Close the engines that no file uses now, unless a shared engine is what starts.

        Engines call it when they start and when they close.
        """
        if not self._starts:
            self._others += 1
            self.close()

    def close(self) -> None:
        """Close the engines that no file uses now. Idempotent."""
        self._there.clear()
        while self._close:
            self._close.popitem()[1]()

    @contextmanager
    def use(self, name: str, start: Callable[[], Shared], close: Callable[[Shared], None]) -> Iterator[Shared]:
        """Return a context with an engine, which stays unless another engine has started or closed meanwhile.

        Args:
            name: of the engine.
            start: makes it if it is not there.
            close: ends it.
        """
        others, made = self._others, self._there.pop(name, None)
        self._close.pop(name, None)
        if made is None:
            self._starts = True
            try:
                made = start()
            finally:
                self._starts = False
        shared: Shared = made  # type: ignore[assignment]
        try:
            yield shared
        except BaseException:
            close(shared)
            raise
        if others == self._others:
            self._there[name], self._close[name] = shared, lambda: close(shared)
        else:
            close(shared)


KEPT = Kept()
