"""The directory's copy of the book of keys, and when each key was used last.

The book is a `serve_app.tenants.book.KeyBook`. The directory follows the book's file, for it runs on the cluster's head, where
the file is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from actors.failures import not_found

# Seconds between two looks at the file.
_LOOK_SECONDS = 2.0


class KeyStore:
    """The newest book, and the uses of its keys.

    Attributes:
        book: None before a replica of the ingress has come with one.
    """

    def __init__(self) -> None:
        self.book: Any = None
        self._uses: dict[str, float] = {}
        self._looked = 0.0

    async def exchange(self, book: Any, uses: Mapping[str, float]) -> Any:
        """Take a process's book and the uses that it has seen; return the newest book.

        Args:
            book: the process's book, or None.
            uses: when keys were used last, in seconds since the epoch, by their hashes.
        """
        if book is not None:
            self.book = book if self.book is None else self.book.newest(book)
        if self.book is None:
            return None
        for name, when in uses.items():
            self._uses[name] = max(when, self._uses.get(name, 0.0))
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            read = await asyncio.to_thread(self.book.reread)
            self.book = self.book.newest(read)
        return self.book

    def revoke(self, tenant: str, label: str) -> Any:
        """Revoke a tenant's key by its label; return the new book.

        Raises:
            ServiceFailure: NOT_FOUND, there is no such key.
        """
        try:
            if self.book is None:
                raise LookupError("no keys are known yet")
            self.book = self.book.revoke(tenant, label)
        except LookupError as error:
            raise not_found(str(error.args[0])) from None
        return self.book

    def uses(self) -> dict[str, float]:
        """Return when each key was used last, in seconds since the epoch, by the keys' hashes."""
        known = {key.hash for tenant in self.book.all for key in tenant.api_keys} if self.book is not None else set()
        self._uses = {name: when for name, when in self._uses.items() if name in known}
        return dict(self._uses)
