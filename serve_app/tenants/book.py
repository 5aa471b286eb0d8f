"""The book of keys: all tenants with the hashes of their keys.

Settings are read once, when the application is built. The book changes while the service runs: the file of tenants is read
again when it changes, and operators revoke keys. The directory has the newest book. Replicas of the ingress and Serve's
proxies compare theirs with it every `FOLLOW_SECONDS`. A directory that takes a dead directory's place learns the book from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.naming import DIRECTORY, NAMESPACE
from serve_app.settings import ANONYMOUS, Tenant, check_tenants
from serve_app.settings_tenants import read_tenants
from serve_app.tenants.keys import KeyTable, Known

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 2.0
# Revoked keys that a service remembers; take revoked keys out of the settings, and it need not remember them.
MOST_REVOKED = 10_000


@dataclass(frozen=True)
class KeyBook:
    """The tenants at one time.

    Attributes:
        tenants: the tenants that the settings list.
        file: the path of the file with more tenants, on the node of the cluster's head; "" for none.
        listed: the tenants of that file.
        stamp: what told the file's contents apart when it was read.
        made: when the settings were read, in seconds since the epoch.
        read: when the file was read, likewise.
        revoked: when each revoked key was revoked, by the key's hash.
    """

    tenants: tuple[Tenant, ...] = ()
    file: str = ""
    listed: tuple[Tenant, ...] = ()
    stamp: tuple[int, ...] = ()
    made: float = field(default_factory=time.time)
    read: float = 0.0
    revoked: Mapping[str, float] = field(default_factory=dict)

    @property
    def all(self) -> tuple[Tenant, ...]:
        """All tenants, with all keys that they were given."""
        return *self.tenants, *self.listed

    @property
    def keyless(self) -> Tenant | None:
        """The tenant of every caller, if no caller needs a key.

        A tenant without keys was given none. A tenant whose keys were all revoked needs one still.
        """
        if self.file or any(tenant.api_keys for tenant in self.tenants):
            return None
        return self.tenants[0] if self.tenants else ANONYMOUS

    @property
    def valid(self) -> tuple[Tenant, ...]:
        """All tenants, each with the keys that are not revoked."""
        return tuple(
            tenant.model_copy(
                update={"api_keys": tuple(key for key in tenant.api_keys if key.hash not in self.revoked)}
            )
            for tenant in self.all
        )

    @property
    def table(self) -> KeyTable:
        """The table that finds callers."""
        return KeyTable(self.valid, self.keyless)

    def reread(self) -> KeyBook:
        """Return the book after a look at its file.

        A file that cannot be read leaves the tenants as they are.
        """
        if not self.file:
            return self
        try:
            stamp = _stamp(self.file)
            if stamp == self.stamp:
                return self
            listed = read_tenants(Path(self.file))
            check_tenants((*self.tenants, *listed))
        except (OSError, ValueError) as error:
            logger.error("the tenants stay as they are: %s", error)
            return self
        logger.warning(
            "the tenants of %s were read again: %s", self.file, ", ".join(one.name for one in listed) or "none"
        )
        return dataclasses.replace(self, listed=listed, stamp=stamp, read=time.time())

    def newest(self, other: KeyBook) -> KeyBook:
        """Return what is newer of two books, with the revoked keys of both."""
        ours = max(self, other, key=lambda book: book.made)
        file = max((book for book in (self, other) if book.file == ours.file), key=lambda book: book.read)
        revoked = {**self.revoked, **other.revoked}
        return dataclasses.replace(ours, listed=file.listed, stamp=file.stamp, read=file.read, revoked=revoked)

    def revoke(self, tenant: str, label: str) -> KeyBook:
        """Return the book without a key.

        Args:
            tenant: the name of the key's tenant.
            label: the key's id or label.

        Raises:
            LookupError: there is no such key.
        """
        keys = [key for one in self.valid if one.name == tenant for key in one.api_keys if key.label == label]
        if not keys:
            raise LookupError(f"tenant {tenant[:80]!r} has no key {label[:80]!r}")
        revoked = dict(sorted(self.revoked.items(), key=lambda item: item[1])[-MOST_REVOKED:])
        return dataclasses.replace(self, revoked={**revoked, **{key.hash: time.time() for key in keys}})


def book_of(tenants: tuple[Tenant, ...], file: str) -> KeyBook:
    """Return the book of a service that is built now, on the node of the cluster's head.

    Raises:
        ValueError: the file is missing, or not a list of tenants with hashed keys, or contradicts the settings.
    """
    if not file:
        return KeyBook(tenants)
    listed = read_tenants(Path(file))
    if not tenants and not listed:
        raise ValueError(f"{file} lists no tenant, so that nobody could call the service")
    check_tenants((*tenants, *listed))
    return KeyBook(tenants, file, listed, _stamp(file), read=time.time())


def _stamp(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


class Keyring:
    """The newest book that a process knows, and the uses of keys that it has seen.

    Args:
        book: the first book; None for a process that learns it.

    Attributes:
        book: the newest book; None before it is known.
    """

    def __init__(self, book: KeyBook | None = None) -> None:
        self.book: KeyBook | None = None
        self._table: KeyTable | None = None
        self._uses: dict[str, float] = {}
        self._known = asyncio.Event()
        self._changed: list[Callable[[], object]] = []
        if book is not None:
            self.update(book)

    @property
    def known(self) -> bool:
        """Whether the process has a book."""
        return self._table is not None

    def when_changed(self, call: Callable[[], object]) -> None:
        """Call a function after each change of the book."""
        self._changed.append(call)

    def update(self, book: KeyBook) -> None:
        """Take a book over."""
        if book == self.book:
            return
        self.book, self._table = book, book.table
        self._known.set()
        for call in self._changed:
            call()

    async def until_known(self, seconds: float) -> bool:
        """Wait for the first book; return whether it came."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._known.wait(), seconds)
        return self.known

    def find(self, key: str | None) -> Known | None:
        """Return the caller with a key, and note the key's use; None without such a caller."""
        known = self._table.find(key) if self._table is not None else None
        if known is not None and known.key is not None:
            self._uses[known.key.hash] = time.time()
        return known

    def holds(self, known: Known) -> bool:
        """Return whether a caller that was found before would be found now."""
        return self._table is not None and self._table.holds(known)

    async def exchange(self, directory: Any) -> None:
        """Compare the book with the directory's, and tell the directory the latest uses of keys."""
        uses, self._uses = self._uses, {}
        try:
            newest = await directory.keys.remote(self.book, uses)
        except BaseException:
            self._uses = uses | self._uses
            raise
        if newest is not None:
            self.update(newest if self.book is None else self.book.newest(newest))

    async def follow(self, directory: Callable[[], Any]) -> None:
        """Exchange the book with the directory again and again.

        Args:
            directory: returns a handle of the directory, or raises ValueError while there is none; called in a thread.
        """
        from ray.exceptions import RayError

        found: Any = None
        while True:
            try:
                found = found or await asyncio.to_thread(directory)
                await self.exchange(found)
            except (ValueError, RayError):
                found = None  # the next look may find another directory
            except Exception:
                logger.exception("the keys could not be compared with the directory's")
            await asyncio.sleep(FOLLOW_SECONDS if self.known else FOLLOW_SECONDS / 10)


def running_directory() -> Any:
    """Return a handle of the cluster's directory.

    Raises:
        ValueError: there is none.
    """
    import ray  # `interpose serve` reads keys before it imports Ray

    return ray.get_actor(DIRECTORY, namespace=NAMESPACE)
