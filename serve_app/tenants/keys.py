"""API keys of calls, and the salted hashes of keys that Serve's proxies compare them with."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import Any

# Set for Serve's proxies where the service is started by `interpose serve`; "salt:hash,hash,…" in hex.
HASHES_VARIABLE = "SERVE_APP_KEY_HASHES"

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
    return key


def why_refused(key: str | None) -> str:
    """Return the message for a caller whose key the service does not know."""
    what = "the API key is not known here" if key else "this service needs an API key"
    return f"{what}: pass api_key to interpose.connect, or set INTERPOSE_API_KEY"


def hashed(keys: Iterable[str]) -> str:
    """Return salted hashes of API keys, for the environment of a proxy."""
    salt = secrets.token_bytes(16)
    return f"{salt.hex()}:{','.join(_hash(salt, key).hex() for key in keys)}"


class KnownKeys:
    """The service's API keys, by their hashes.

    Args:
        hashes: what `hashed` returned.
    """

    def __init__(self, hashes: str) -> None:
        salt, _, known = hashes.partition(":")
        self._salt = bytes.fromhex(salt)
        self._known = [bytes.fromhex(one) for one in known.split(",") if one]

    def __contains__(self, key: str | None) -> bool:
        if key is None:
            return False
        mine = _hash(self._salt, key)
        # Comparing with all hashes takes the same time for every key, so that the time says nothing about a key.
        return sum(hmac.compare_digest(mine, one) for one in self._known) > 0


def _hash(salt: bytes, key: str) -> bytes:
    return hmac.digest(salt, key.encode(errors="surrogateescape"), hashlib.sha256)
