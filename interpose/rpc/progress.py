"""Progress bars of tqdm, where it is installed, for long transfers and generations.

A bar is made when there is something to show, so that a trace has one bar at a time: uploading, then generating, then fetching.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
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


class _SharedBar:
    """A bar that is drawn from its first progress on; several threads may update it.

    Args:
        tqdm: the class of the bar.
        options: the arguments of the class.
    """

    def __init__(self, tqdm: Any, options: dict[str, Any]) -> None:
        self._tqdm = tqdm
        self._options = options
        self._begun = time.time()
        self._lock = threading.Lock()
        self._bar: Any = None
        self._closed = False

    def update(self, n: int) -> None:
        if n <= 0:
            return
        with self._lock:
            if self._closed:
                return
            if self._bar is None:
                self._bar = self._tqdm(delay=_DELAY_SECONDS, leave=False, **self._options)
                self._bar.start_t = self._begun
            self._bar.update(n)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.close()


class Progress:
    """Makes progress bars; draws nothing with `enabled=False` or without tqdm."""

    def __init__(self, enabled: bool) -> None:
        self._tqdm = _tqdm() if enabled else None

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
        bar = _SharedBar(self._tqdm, options)
        try:
            yield bar
        finally:
            bar.close()


def write(text: str) -> None:
    """Write text of a block to the standard output, beside bars that are drawn."""
    std: Any = sys.modules.get("tqdm.std")
    if std is not None and getattr(std.tqdm, "_instances", None):
        with std.tqdm.external_write_mode():
            sys.stdout.write(text)
    else:
        sys.stdout.write(text)
    sys.stdout.flush()


def _tqdm() -> Any:
    """Return the class of the bars; None without tqdm.

    `tqdm.auto` warns in a notebook without ipywidgets. There the bars are text.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    in_page = running is not None and type(running).__name__ == "ZMQInteractiveShell"
    if not in_page or importlib.util.find_spec("ipywidgets") is None:
        return tqdm
    from tqdm.notebook import tqdm as widget

    return widget
