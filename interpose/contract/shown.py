"""The names of an object that `dir()` and tab completion show: the names for a notebook."""

from __future__ import annotations

from collections.abc import Iterable

# Methods of a captured block that the library calls.
OF_BLOCKS = frozenset({"run_block", "run_block_async", "run_alone", "watched", "dropped", "used", "unused"})


def shown(obj: object, internal: Iterable[str] = ()) -> list[str]:
    """Return the names of an object without its private names.

    Args:
        obj: the object.
        internal: public names that only the library uses.
    """
    hidden = frozenset(internal)
    return sorted(name for name in object.__dir__(obj) if name not in hidden and _is_public(name))


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))
