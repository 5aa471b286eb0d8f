"""Lists and dicts that a block has from before, while the block is traced: what is added to them is noted, not done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from executor.plan.refuse import Refused

_READ = "the loop adds to this and reads it, so what it reads depends on the steps before"
_KEEP = "keep the last value in a variable of its own: previous = value"


class Written:
    """A list or dict to which the traced code adds.

    It is no list or dict, so that code which needs a real one fails, and does not see the items of now.

    Args:
        index: its number among those that the block writes to.
        here: returns the notebook's line that runs now.
        note: gets what is added: the number, the key (None in a list), the value, and the line.
    """

    def __init__(self, index: int, here: Callable[[], int], note: Callable[[int, Any, Any, int], None]) -> None:
        self.index = index
        self._here = here
        self._note = note
        self._added = False
        self._read = 0

    def _add(self, key: Any, value: Any) -> None:
        if self._read:
            raise Refused(self._read, _READ, _KEEP)
        self._added = True
        self._note(self.index, key, value, self._here())

    def _look(self) -> None:
        if self._added:
            raise Refused(self._here(), _READ, _KEEP)
        self._read = self._read or self._here()


class WrittenList(Written):
    """A list to which the traced code adds.

    Args:
        items: what it holds, as the traced code may see it.
        index, here, note: as of `Written`.
    """

    def __init__(self, items: list[Any], *rest: Any) -> None:
        super().__init__(*rest)
        self._items = items

    def append(self, value: Any) -> None:
        self._add(None, value)

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self._add(None, value)

    def __iadd__(self, values: Iterable[Any]) -> WrittenList:
        self.extend(values)
        return self

    def __getitem__(self, key: Any) -> Any:
        self._look()
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        self._look()
        return iter(self._items)

    def __len__(self) -> int:
        self._look()
        return len(self._items)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise Refused(self._here(), "an item of a list is replaced", "append to the list")


class WrittenDict(Written):
    """A dict into which the traced code puts.

    Args:
        items: what it holds, as the traced code may see it.
        index, here, note: as of `Written`.
    """

    def __init__(self, items: dict[Any, Any], *rest: Any) -> None:
        super().__init__(*rest)
        self._items = items

    def __setitem__(self, key: Any, value: Any) -> None:
        self._add(key, value)

    def __getitem__(self, key: Any) -> Any:
        self._look()
        return self._items[key]

    def __contains__(self, key: Any) -> bool:
        self._look()
        return key in self._items

    def __iter__(self) -> Iterator[Any]:
        self._look()
        return iter(self._items)

    def __len__(self) -> int:
        self._look()
        return len(self._items)

    def items(self) -> Iterable[tuple[Any, Any]]:
        self._look()
        return list(self._items.items())

    def values(self) -> Iterable[Any]:
        self._look()
        return list(self._items.values())

    def keys(self) -> Iterable[Any]:
        self._look()
        return list(self._items)

    def get(self, key: Any, default: Any = None) -> Any:
        self._look()
        return self._items.get(key, default)
