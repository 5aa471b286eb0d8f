"""What a session asks of the directory, without Ray: the archive itself, behind methods that are called as an actor's are."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

from actors.archive import Archive
from actors.upload_store import UploadStore


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


class Uploaded:
    """What a session asks of its tenant's uploads: `find_upload` and `keep_upload`."""

    def __init__(self) -> None:
        self.store = UploadStore(1 << 20, 600.0, self._copied)
        self.find_upload = _Answering(self._find)
        self.keep_upload = _Answering(self._keep)

    @staticmethod
    async def _copied(ref: Any) -> Any:
        return ref

    async def _find(self, session_id: str, digest: str, size: int) -> list[Any]:
        return [self.store.find("tenant", digest, size)]

    async def _keep(self, session_id: str, digest: str, refs: list[Any], size: int) -> list[Any]:
        return [await self.store.keep("tenant", digest, refs[0], size, None)]


class _Answering:
    """A method that answers."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method


class LocalDirectory:
    """A directory with one session, "s"."""

    def __init__(self, kept: bool = False) -> None:
        self.archive = Archive()
        self.archive.begin("s", kept)
        self.keep = Method(self.archive.keep)
        self.drop = Method(self.archive.drop)
        self.drop_variables = Method(self.archive.drop_variables)
        self.uploaded = Uploaded()
        self.find_upload = self.uploaded.find_upload
        self.keep_upload = self.uploaded.keep_upload
