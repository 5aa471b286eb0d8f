"""Errors as plain values, between a worker and a sandboxed process."""

from __future__ import annotations

import builtins
from typing import Any

from executor.core.errors import BudgetExceeded, Refusal
from executor.core.text import clip

Told = tuple[str, int, str, str, list[str]]


def told_of(error: BaseException) -> Told:
    """Return an error as plain values."""
    if isinstance(error, Refusal):
        return "Refusal", int(error.code), error.message, error.location, list(error.suggestions)
    if isinstance(error, BudgetExceeded):
        return "BudgetExceeded", int(error.code), error.message, "", []
    return type(error).__name__, 0, clip(str(error)), "", []


def made_of(told: tuple[Any, ...]) -> BaseException:
    """Return the error that a worker told."""
    name, code, message, location, suggestions = told
    if name == "Refusal":
        return Refusal(code, message, location=location, suggestions=tuple(suggestions))
    if name == "BudgetExceeded":
        return BudgetExceeded(code, message)
    kind = getattr(builtins, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(message)


def refusal_of(told: Any) -> Refusal:
    """Return the refusal that a sandboxed process told.

    Raises:
        ValueError: it is none.
    """
    form = isinstance(told, tuple) and [type(item) for item in told] == [str, int, str, str, list]
    if not form or told[0] != "Refusal" or not 0 < told[1] < 100:
        raise ValueError("no refusal")
    return Refusal(told[1], clip(told[2]), location=clip(told[3]))
