"""API keys as settings give them: hashes with an expiry, or keys, hashed when they are read."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serve_app.key_hashes import ID, KeyHash, NoHash, hashed, salt_of_process
from serve_app.settings_model import Part

SHORTEST = 8
LONGEST = 1000


class ApiKey(Part):
    """One API key of a tenant, by its hash.

    In the settings it is a mapping, a hash alone, or the key itself. No object of the settings holds a key itself.
    """

    id: str = Field("", description="the name in keys that begin with `ip_ID_`, as `interpose keys new` makes them")
    hash: str = Field(repr=False, description="the salted hash of the key: `interpose keys new` prints it")
    expires: datetime.datetime | None = Field(
        None, description="when the key ends: a date, or a time; UTC unless it says"
    )
    clear: bool = Field(False, description="whether the settings have the key itself")

    @model_validator(mode="before")
    @classmethod
    def _hashed(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            if "clear" in value:
                raise PydanticCustomError("key", "a key has the settings id, hash and expires")
            return value
        if not isinstance(value, str):
            raise PydanticCustomError("key", "an API key is a text, or a mapping with its hash")
        if value.startswith("$"):
            return {"hash": value}
        if not SHORTEST <= len(value) <= LONGEST:
            raise PydanticCustomError(
                "key", "an API key has from {least} to {most} characters", {"least": SHORTEST, "most": LONGEST}
            )
        return {"hash": str(hashed(value, salt_of_process())), "clear": True}

    @field_validator("id")
    @classmethod
    def _plain(cls, given: str) -> str:
        if given and not ID.fullmatch(given):
            raise PydanticCustomError("key", "a key's id has up to 40 letters, digits, '.' and '-'")
        return given

    @field_validator("hash")
    @classmethod
    def _a_hash(cls, text: str) -> str:
        try:
            return str(KeyHash.parse(text))
        except NoHash as error:
            raise PydanticCustomError("key", "{why}", {"why": str(error)}) from None

    @field_validator("expires")
    @classmethod
    def _in_a_zone(cls, time: datetime.datetime | None) -> datetime.datetime | None:
        return time.replace(tzinfo=datetime.timezone.utc) if time is not None and time.tzinfo is None else time

    @property
    def label(self) -> str:
        """The key's id, or a short name made of its hash, for operators."""
        return self.id or f"key-{KeyHash.parse(self.hash).digest.hex()[:8]}"

    def expired(self, now: datetime.datetime) -> bool:
        """Return whether the key has ended."""
        return self.expires is not None and now >= self.expires


def clear_keys(keys: Iterable[tuple[str, ApiKey]]) -> str:
    """Return a warning about the keys that the settings have themselves, or "".

    Args:
        keys: each key with the name of its tenant.
    """
    names = sorted({name for name, key in keys if key.clear})
    if not names:
        return ""
    return (
        f"WARNING: the settings have API keys of {', '.join(names)} themselves, for every reader of the settings. "
        "That is for a first try: `interpose keys new` makes keys, and the hashes that belong into the settings"
    )
