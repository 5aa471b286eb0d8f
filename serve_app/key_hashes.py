"""API keys and their salted hashes, in the format that passlib calls `pbkdf2_sha256`.

A hash is `$pbkdf2-sha256$ROUNDS$SALT$HASH`. A key that `new_key` makes has 256 random bits. Nobody finds such a key by trying,
however fast a try is, so one round is enough, and a service checks a key in microseconds with every call. Rounds and
slow functions as scrypt are for passwords, which people choose. The salt keeps two services' hashes of one key apart.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import re
import secrets
from dataclasses import dataclass

SCHEME = "pbkdf2-sha256"
# A key is checked with every call, also with calls of strangers.
MOST_ROUNDS = 1000
_BYTES = 32
_SALT_BYTES = 16
_MOST_SALT = 64

PREFIX = "ip"
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,39}")


class NoHash(ValueError):
    """A text is not a hash of a key, or not of a kind that is taken."""


@dataclass(frozen=True)
class KeyHash:
    """The hash of one key.

    Attributes:
        rounds: of PBKDF2 with HMAC and SHA-256.
        salt: random bytes.
        digest: 32 bytes.
    """

    rounds: int
    salt: bytes
    digest: bytes

    @classmethod
    def parse(cls, text: str) -> KeyHash:
        """Read a hash.

        Raises:
            NoHash: the text is no such hash, or has too many rounds.
        """
        parts = text.split("$")
        if len(parts) != 5 or parts[0] or parts[1] != SCHEME:
            raise NoHash(
                f"a key's hash has the form ${SCHEME}$ROUNDS$SALT$HASH: `interpose keys new` makes a key and its hash"
            )
        try:
            found = cls(int(parts[2]), _decoded(parts[3]), _decoded(parts[4]))
        except (ValueError, binascii.Error):
            raise NoHash("the key's hash is not complete: rounds, salt or hash are missing or malformed") from None
        if not 1 <= found.rounds <= MOST_ROUNDS:
            raise NoHash(f"the key's hash has {found.rounds} rounds; from 1 to {MOST_ROUNDS} are taken")
        if len(found.digest) != _BYTES or not 8 <= len(found.salt) <= _MOST_SALT:
            raise NoHash(f"the key's hash has {_BYTES} bytes, and its salt from 8 to {_MOST_SALT}")
        return found

    def __str__(self) -> str:
        return f"${SCHEME}${self.rounds}${_encoded(self.salt)}${_encoded(self.digest)}"


def new_key(key_id: str = "") -> str:
    """Return a new API key of 256 random bits; with an id the key begins with `ip_ID_`."""
    if key_id and not ID.fullmatch(key_id):
        raise ValueError(f"a key's id has up to 40 letters, digits, '.' and '-'; {key_id[:60]!r} is not such an id")
    return "_".join([PREFIX, *([key_id] if key_id else []), secrets.token_urlsafe(_BYTES)])


def id_in(key: str) -> str:
    """Return the id that a key begins with, or ""."""
    prefix, _, rest = key.partition("_")
    found, divider, _ = rest.partition("_")
    return found if prefix == PREFIX and divider and ID.fullmatch(found) else ""


def hashed(key: str, salt: bytes | None = None, rounds: int = 1) -> KeyHash:
    """Return the hash of a key, with a new salt unless one is given."""
    salt = secrets.token_bytes(_SALT_BYTES) if salt is None else salt
    return KeyHash(rounds, salt, digest_of(key, salt, rounds))


def digest_of(key: str, salt: bytes, rounds: int) -> bytes:
    """Return the 32 bytes of a key's hash."""
    return hashlib.pbkdf2_hmac("sha256", key.encode(errors="surrogateescape"), salt, rounds)


@functools.cache
def salt_of_process() -> bytes:
    """Return this process's salt for keys that are in the settings in clear."""
    return secrets.token_bytes(_SALT_BYTES)


def _encoded(data: bytes) -> str:
    """Return bytes as passlib writes them: base64 with "." for "+", not padded."""
    return base64.b64encode(data, altchars=b"./").decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"./", validate=True)
