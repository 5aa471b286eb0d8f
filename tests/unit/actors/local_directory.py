"""What a session asks of the directory, without Ray: the archive itself, behind methods that are called as an actor's are."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

from actors.archive import Archive


class Method:
    """A method that gets copies of its arguments and answers when it may.

    Attributes:
        gate: is set while it answers.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self.gate = asyncio.Event()
        self.gate.set()

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        self._function(*pickle.loads(pickle.dumps(args)))
        return asyncio.ensure_future(self.gate.wait())


class LocalDirectory:
    """A directory with one session, "s"."""

    def __init__(self, kept: bool = False) -> None:
        self.archive = Archive()
        self.archive.begin("s", kept)
        self.keep = Method(self.archive.keep)
        self.drop = Method(self.archive.drop)
        self.drop_variables = Method(self.archive.drop_variables)
