"""Texts that go to clients are cut to a bounded length."""

from __future__ import annotations

MAX_TEXT = 8192


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Shorten `text` to `limit` characters, with a note that it was cut."""
    return text if len(text) <= limit else text[: limit - 20] + f"… [{len(text)} chars]"
