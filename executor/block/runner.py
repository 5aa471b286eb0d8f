"""The abstract runner of a block: what the forward's side may ask of the running code.

A runner takes one turn at a time. In a turn the code runs until it waits or ends. Then the runner has written into the block's
state what the block waits for (`BlockState.waits`), or how the block ended (`BlockState.ending`). A method returns when the turn
is over, and raises nothing: an error of the code is the block's failure, in the state.

Nothing here says where the code runs: as a greenlet in the worker (`executor.block.greenlet_runner`), as a tensor program, or in
another process. So the runner itself bounds the time and the memory of a turn. A served value reaches the code
in the runner's own way: as the same object, as operations on it, or as a copy of its bytes. A change of the code is in the
`Served` before the turn is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from typing import Any

from executor.block.state import BlockState
from executor.core.errors import Refusal
from executor.core.location import Kind
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb


class Runner(ABC):
    """Runs the code of one block.

    Args:
        state: the block's state; the runner writes `waits`, `ending` and `record` there, and reads the rest.
    """

    def __init__(self, state: BlockState) -> None:
        self._state = state

    @property
    @abstractmethod
    def names(self) -> MutableMapping[str, Any]:
        """The block's names between its turns.

        To read or set a name may cost a message to another process.
        """

    @property
    @abstractmethod
    def lends_names(self) -> bool:
        """Whether other blocks may call the block's functions after the block has ended.

        These functions use the block's names.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the code has begun and has not ended."""

    @property
    def may_start_early(self) -> bool:
        """Whether it is of use that the code starts before the request's first step."""
        return False

    @abstractmethod
    def start(self) -> None:
        """Run the code up to the first thing that it waits for."""

    @abstractmethod
    def serve(self, served: Served) -> None:
        """Go on with the value at the location that the block waits for.

        The changes of the code are in `served` afterwards.
        """

    @abstractmethod
    def resume(self, value: Any) -> None:
        """Go on from anything but a location.

        Args:
            value: what the block waits for: whether the step came (bool), the result (`Result`), None from a barrier, or what the
                applied module made.
        """

    @abstractmethod
    def throw(self, error: BaseException) -> None:
        """Raise `error` at the line where the code waits, or before its first line."""

    @property
    def own_process(self) -> bool:
        """Whether the code has a process of its own.

        The turns of several such blocks can pass at the same time.
        """
        return False

    def announce(self) -> None:  # noqa: B027 - a block in the worker would keep the worker from preparing the step
        """Let code with a process of its own go on if it waits for the step that begins next.

        `start` or `resume` is called next.
        """

    def begin_serve(self, served: Served) -> Callable[[], None]:
        """Begin what `serve` does; return what ends it.

        The end is called before anything else is asked of the runner.
        """
        self.serve(served)
        return _over

    def begin_resume(self, value: Any) -> Callable[[], None]:
        """Begin what `resume` does; return what ends it, as of `begin_serve`."""
        self.resume(value)
        return _over

    def withdraw(self) -> None:  # noqa: B027 - most runners have nothing to do
        """Have the coming steps run the block, which was to stay away from them.

        Another rank does not run them without the block.
        """

    def bring_changes(self) -> None:  # noqa: B027 - where the code has the served value itself there is nothing to do
        """Put the code's changes into the served value: the model leaves the location."""

    def finish(self) -> None:
        """Let the code run to its end.

        The generation is over, and `BlockState.progress` has the result.
        """
        state = self._state
        waiting = state.waits.location
        if waiting is None:
            self.throw(Refusal(pb.ERROR_CODE_UNAVAILABLE, "the request ended before it ran; submit it again"))
        elif waiting.kind == Kind.RESULT:
            self.resume(state.progress.result)
        elif waiting.kind == Kind.STEP:
            self.resume(False)
        elif state.waits.barrier is not None:
            self.throw(state.waits.barrier.ended())
        else:
            self.throw(state.never(waiting))

    @abstractmethod
    def cancel(self) -> None:
        """End the code wherever it is. Idempotent; `ending` is the caller's to write."""

    @abstractmethod
    def let_go(self, do: Callable[[], object]) -> None:
        """Drop objects of the block's, whose `__del__` may run, within the block's limits.

        Args:
            do: drops them. If that takes too long, the block fails.
        """


def _over() -> None:
    """Do nothing: the turn is over."""
