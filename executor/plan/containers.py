"""Lists and dicts of a block that is traced: additions are noted, and not made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from executor.plan.refuse import Refused


class Written:
    """A list or dict to which the traced code adds.

    The contents differ from step to step, so the traced code may not look. It is no list or dict, so that code which needs a
    real one fails.

    Args:
        index: its number among the containers that the block writes to.
        here: returns the notebook's line that runs now.
        note: gets what is added: the number, the key (None in a list), the value, and the line.
    """

    def __init__(self, index: int, here: Callable[[], int], note: Callable[[int, Any, Any, int], None]) -> None:
        self._index = index
        self._here = here
        self._note = note

    def _add(self, key: Any, value: Any) -> None:
        self._note(self._index, key, value, self._here())

    def _look(self) -> NoReturn:
        raise Refused(
            self._here(),
            "the loop adds to this and reads it, so what it reads depends on the steps before",
            "keep the last value in a variable of its own: previous = value",
        )

    def __iter__(self) -> Iterator[Any]:
        self._look()

    def __len__(self) -> int:
        self._look()

    def __contains__(self, value: object) -> bool:
        self._look()

    def __getitem__(self, key: Any) -> Any:
        self._look()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._look()


class WrittenList(Written):
    """A list to which the traced code adds."""

    def append(self, value: Any) -> None:
        self._add(None, value)

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self._add(None, value)

    def __iadd__(self, values: Iterable[Any]) -> WrittenList:
        self.extend(values)
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        raise Refused(self._here(), "an item of a list is replaced", "append to the list")


class WrittenDict(Written):
    """A dict into which the traced code puts."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key is None:
            raise Refused(self._here(), "None is a key", "use numbers or text as keys")
        self._add(key, value)
