"""What a sandboxed process has in the place of the worker's parts."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import torch

from executor.block.api import RunningBlock
from executor.block.budget import Budget
from executor.block.cache import Recorder
from executor.core.errors import Refusal
from executor.model.call import Call
from executor.model.node import Node
from executor.model.parameters import Parameters
from executor.model.skips import Skips
from executor.model.tree import ModuleTree
from executor.sandbox.channel import ChildEnd, Kind
from interpose.contract.cache import Cache
from interpose.v1 import trace_pb2 as pb

_PIECE = 64 << 20  # bytes of a blob that travel at a time
_APPLIED = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float, str))


class OwnBudget(Budget):
    """The bounds of a block in a process of its own, which can read no file about itself.

    The memory is the largest that the process has had.
    """

    def begin_step(self) -> None:
        self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def _grown(self) -> int:
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._peak) << 10


class ToldSkips(Skips):
    """Notes what is skipped, for the worker.

    Attributes:
        begun: the skips that the worker has not been told: path, step and position of each.
    """

    def __init__(self, tree: ModuleTree) -> None:
        super().__init__(tree)
        self.begun: list[tuple[str, int, int]] = []

    def begin(self, node: Node, step: int, position: int) -> None:
        super().begin(node, step, position)
        self.begun.append((node.path, step, position))


class SandboxedBlock(RunningBlock):
    """A block whose recorders the worker fills.

    Attributes:
        begun: the recorders that the worker has not been told.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun: list[Recorder] = []

    def record(
        self, modules: object, device: object, dtype: object, include_output: bool, include_inputs: bool
    ) -> Cache:
        cache = super().record(modules, device, dtype, include_output, include_inputs)
        self.begun.append(self._state.record.recorders[-1])
        return cache


class FarApplier:
    """Hands modules to apply on to the worker, which has them and checks the values.

    Args:
        memory_bytes: bound on the largest weight that a block gets as one tensor, in bytes.
        widths: as of `Parameters`.
    """

    def __init__(self, memory_bytes: int, widths: tuple[int, int]) -> None:
        self.parameters = Parameters(1, memory_bytes, widths)

    def prepare(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call as it was written.

        Raises:
            Refusal: INVALID_ARGUMENT, no module is applied to such a value.
        """
        for value in (*args, *kwargs.values()):
            if value is not None and type(value) not in _APPLIED:
                raise Refusal(
                    pb.ERROR_CODE_INVALID_ARGUMENT,
                    f"{node.path}(…) was given a {type(value).__name__}; in a sandbox modules are applied to tensors and numbers",
                    location=node.path,
                )
        return Call(node, args, kwargs, single=False)


class ToWorker:
    """Where blobs and increments go: to the worker.

    Args:
        end: the channel.
    """

    def __init__(self, end: ChildEnd) -> None:
        self._end = end

    def put(self, session: str, trace_id: str, blob_id: str, data: memoryview) -> None:
        """Send the bytes of a saved value, in pieces."""
        data = data.cast("B")
        for first in range(0, max(len(data), 1), _PIECE):
            self._end.send(Kind.PIECE, (blob_id, len(data), data[first : first + _PIECE]))
            self._end.next()

    def increment(self, session: str, trace_id: str, data: bytes) -> None:
        self._end.send(Kind.INCREMENT, data)


def fetched(end: ChildEnd, blob_id: str, error_of: Callable[[Any], BaseException]) -> bytes | bytearray:
    """Return the bytes of an uploaded value, which the worker sends in pieces.

    Args:
        end: the channel.
        blob_id: the value.
        error_of: makes the error that the worker told.

    Raises:
        Refusal: the worker has them not.
    """
    data = bytearray()
    while True:
        end.send(Kind.BLOB, (blob_id, len(data)))
        _, told = end.next()
        if told["error"] is not None:
            raise error_of(told["error"])
        if not data and len(told["data"]) == told["size"]:
            only: bytes = told["data"]
            return only
        data += told["data"]
        if len(data) == told["size"]:
            return data
