"""The names of a tracer that exist only inside a block with a prompt.

Editors and type checkers read the names here. The engine has the same names (`executor.block.envoy`). In the notebook
their use is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn, Protocol

from interpose.contract.cache import Cache

IN_BLOCK = ("iter", "all", "cache", "stop", "log", "result")


class Steps(Protocol):
    """Steps of the generation: `for step in tracer.iter[a:b]:`, inside a block only.

    Each turn of the loop waits for its step. A loop with an open end stops when the generation stops.
    """

    def __getitem__(self, key: slice | int | list[int]) -> Steps:
        """Choose steps, counted from 0: `iter[2]`, `iter[1:4]`, `iter[:]`, `iter[[0, 2]]`."""

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers of the steps."""

    def __enter__(self) -> int:
        """Run the body of a `with` once for each step."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class InEdit(ABC):
    """Base class of tracers and edits: names of a block that runs in the model.

    Raises:
        InvalidArgument: code outside of such a block used a name.
    """

    @abstractmethod
    def _outside(self, name: str) -> NoReturn:
        """Raise the error for a name that is used in the notebook."""

    @property
    def iter(self) -> Steps:
        """Steps of the generation: `for step in tracer.iter[a:b]:`; inside a block only."""
        self._outside("iter")

    def all(self) -> Steps:
        """Every step of the generation: `for step in tracer.all():`; inside a block only."""
        self._outside("all")

    def stop(self) -> None:
        """End this request now; the values saved so far come back. Inside a block only."""
        self._outside("stop")


class InBlock(InEdit):
    """Base class of tracers: names that exist only inside a block with a prompt."""

    def cache(
        self,
        modules: Any = None,
        device: Any = "cpu",
        dtype: Any = None,
        detach: bool = True,
        include_output: bool = True,
        include_inputs: bool = False,
        non_blocking: bool = False,
    ) -> Cache:
        """Record many modules from here to the end of the generation; inside a block only.

        The cache is saved: after the block, `cache["model.layers.2"].output` or `cache.model.layers[2].output` is the value of
        this prompt's rows. With several steps it is a list with a value for each step.

        Args:
            modules: modules or paths; None: all modules that run.
            device: where tensors wait for the end: "cpu", or None for the engine's own device.
            dtype: the dtype of the recorded tensors; None: unchanged.
            detach, non_blocking: accepted for code that names them.
            include_output, include_inputs: which values of the modules are recorded.
        """
        self._outside("cache")
