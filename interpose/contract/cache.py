"""The values that `tracer.cache()` recorded, in the form of nnsight 0.8.

A value is found by the module's path, or along the module tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from interpose.contract.shown import shown


@dataclass(eq=False)
class Visit:
    """The values of a module in one step.

    Attributes:
        output: the module's output as the model used it, with the changes of the blocks.
        inputs: `(args, kwargs)`; None unless the call to `tracer.cache` asked for inputs.
    """

    output: Any = None
    inputs: Any = None

    @property
    def input(self) -> Any:
        """The first positional argument, else the first keyword argument, else None."""
        if self.inputs is None:
            return None
        args, kwargs = self.inputs
        return next(iter((*args, *kwargs.values())), None)


@dataclass(eq=False)
class Cache:
    """Recorded values: `cache["model.layers.2"].output`, or `cache.model.layers[2].output`.

    Attributes:
        entries: a `Visit` for each step, by module path.
        refused: the reasons, by module path, for modules that could not be recorded when the block asked for all modules.
    """

    entries: dict[str, list[Visit]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, path: str) -> CacheView:
        if not isinstance(path, str):
            raise KeyError(f"modules are named by their paths, cache['model.layers.2'], not {path!r}")
        if path in self.refused:
            raise KeyError(f"{path} was not recorded: {self.refused[path]}")
        if not self._below(path):
            raise KeyError(f"{path} was not recorded; cache.keys() are the modules that were")
        return CacheView(self, path)

    def __getattr__(self, name: str) -> CacheView:
        if name.startswith("_") or name in self.__dataclass_fields__ or not self._below(name):
            raise AttributeError(f"{name!r} was not recorded; cache.keys() are the modules that were")
        return CacheView(self, name)

    def __contains__(self, path: object) -> bool:
        return path in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def keys(self) -> list[str]:
        """Return the paths of the recorded modules, in the order of the forward pass."""
        return list(self.entries)

    def __dir__(self) -> list[str]:
        return sorted({*shown(self), *_next_names(self.entries, "")})

    def _ipython_key_completions_(self) -> list[str]:
        return self.keys()

    def __repr__(self) -> str:
        return f"<cache of {len(self.entries)} modules: {', '.join(self.entries)}>"

    def _below(self, path: str) -> bool:
        return any(key == path or key.startswith(f"{path}.") for key in self.entries)


class CacheView:
    """A module in a cache, or a path with recorded modules below it.

    Attributes:
        output, inputs, input: the module's value. If the module was recorded in several steps, a list with a value for each
            step.
    """

    def __init__(self, cache: Cache, path: str) -> None:
        self._cache = cache
        self._path = path

    @property
    def output(self) -> Any:
        return self._values("output")

    @property
    def inputs(self) -> Any:
        return self._values("inputs")

    @property
    def input(self) -> Any:
        return self._values("input")

    @property
    def visits(self) -> list[Visit]:
        """A `Visit` for each step in which the module was recorded."""
        if self._path not in self._cache.entries:
            raise KeyError(f"{self._path} itself was not recorded; modules below it were: {', '.join(self.keys())}")
        return self._cache.entries[self._path]

    def keys(self) -> list[str]:
        """Return the paths of the recorded modules at this path and below it."""
        path = self._path
        return [key for key in self._cache.entries if key == path or key.startswith(f"{path}.")]

    def __len__(self) -> int:
        return len(self.visits)

    def __getitem__(self, key: str | int) -> CacheView:
        return self._cache[f"{self._path}.{key}"]

    def __getattr__(self, name: str) -> CacheView:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._cache[f"{self._path}.{name}"]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __dir__(self) -> list[str]:
        return sorted({*shown(self), *_next_names(self.keys(), f"{self._path}.")})

    def __repr__(self) -> str:
        return f"<cache at {self._path}: {', '.join(self.keys())}>"

    def _values(self, name: str) -> Any:
        values = [getattr(visit, name) for visit in self.visits]
        return values[0] if len(values) == 1 else values


def _next_names(paths: Iterable[str], prefix: str) -> set[str]:
    """Return the names that follow a prefix in paths of modules; numbers are left out."""
    names = (path[len(prefix) :].partition(".")[0] for path in paths if path.startswith(prefix))
    return {name for name in names if name.isidentifier()}
