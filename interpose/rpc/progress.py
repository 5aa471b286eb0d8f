"""Progress bars of tqdm, where it is installed, for long transfers and generations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_DELAY_SECONDS = 2.0


class Bar(Protocol):
    """A progress bar."""

    def update(self, n: int) -> Any: ...


class _Nothing:
    """A bar that draws nothing."""

    def update(self, n: int) -> None:
        pass


class Progress:
    """Makes progress bars; draws nothing with `enabled=False` or without tqdm."""

    def __init__(self, enabled: bool) -> None:
        self._tqdm: Any = None
        if enabled:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._tqdm = tqdm

    @contextmanager
    def bytes(self, what: str, total: int) -> Iterator[Bar]:
        """Show a transfer of `total` bytes."""
        with self._bar(desc=what, total=total, unit="B", unit_scale=True, unit_divisor=1024) as bar:
            yield bar

    @contextmanager
    def tokens(self, what: str, total: int | None) -> Iterator[Bar]:
        """Show a generation of `total` tokens; None: unknown."""
        with self._bar(desc=what, total=total, unit="tok") as bar:
            yield bar

    @contextmanager
    def _bar(self, **options: Any) -> Iterator[Bar]:
        if self._tqdm is None:
            yield _Nothing()
            return
        bar = self._tqdm(delay=_DELAY_SECONDS, leave=False, **options)
        try:
            yield bar
        finally:
            bar.close()
