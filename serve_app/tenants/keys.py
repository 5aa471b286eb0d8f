"""API keys of calls, and the tenants that they belong to.

A process of the service has the hashes of the keys, never the keys.
"""

from __future__ import annotations

import datetime
import hmac
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.key_hashes import KeyHash, digest_of, id_in
from serve_app.settings import ApiKey, Tenant
from serve_app.settings_keys import LONGEST

# Bytes of a message that a caller without a key may send.
KEYLESS_BYTES = 4096


def key_of(metadata: Iterable[Any]) -> str | None:
    """Return the API key in a call's metadata, or None.

    The key is in `x-api-key`, or in `authorization: Bearer …`.
    """
    found = dict(metadata)
    key = found.get("x-api-key")
    if key is None and str(found.get("authorization", "")).startswith("Bearer "):
        key = str(found["authorization"]).removeprefix("Bearer ")
    return key if isinstance(key, str) else None


def why_refused(key: str | None) -> str:
    """Return the message for a caller whose key the service does not know."""
    what = "the API key is not known here" if key else "this service needs an API key"
    return f"{what}: pass api_key to interpose.connect, or set INTERPOSE_API_KEY"


@dataclass(frozen=True)
class Known:
    """The caller of a call.

    Attributes:
        tenant: the caller's tenant.
        key: the key of the call; None where the tenant needs none.
    """

    tenant: Tenant
    key: ApiKey | None = None


class KeyTable:
    """Finds the tenant of a key.

    A key that begins with an id is compared with the hash of that id, any other key with all hashes that have no id.

    Args:
        tenants: all tenants of the service.
        keyless: the tenant of every caller, if no caller needs a key.
    """

    def __init__(self, tenants: Sequence[Tenant], keyless: Tenant | None = None) -> None:
        self._keyless = Known(keyless) if keyless is not None else None
        self._by_id: dict[str, tuple[KeyHash, Known]] = {}
        self._others: defaultdict[tuple[int, bytes], dict[bytes, Known]] = defaultdict(dict)
        self._keys = {key.hash: key for tenant in tenants for key in tenant.api_keys}
        for tenant in tenants:
            for key in tenant.api_keys:
                found = KeyHash.parse(key.hash)
                if key.id:
                    self._by_id[key.id] = found, Known(tenant, key)
                else:
                    self._others[found.rounds, found.salt][found.digest] = Known(tenant, key)

    def find(self, key: str | None) -> Known | None:
        """Return the caller with a key; None if the key is missing, not known, or has expired."""
        if self._keyless is not None:
            return self._keyless
        if not key or len(key) > LONGEST:
            return None
        known = self._named(key) or self._unnamed(key)
        if known is None or known.key is None or known.key.expired(_now()):
            return None
        return known

    def holds(self, known: Known) -> bool:
        """Return whether a caller that some table has found is a caller of this table now."""
        if known.key is None:
            return self._keyless is not None
        key = self._keys.get(known.key.hash)
        return key is not None and not key.expired(_now())

    def _named(self, key: str) -> Known | None:
        found = self._by_id.get(id_in(key))
        if found is None:
            return None
        expected, known = found
        return known if hmac.compare_digest(digest_of(key, expected.salt, expected.rounds), expected.digest) else None

    def _unnamed(self, key: str) -> Known | None:
        # A digest is looked up, not compared byte by byte: callers cannot choose the beginning of a digest.
        for (rounds, salt), digests in self._others.items():
            known = digests.get(digest_of(key, salt, rounds))
            if known is not None:
                return known
        return None


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)
