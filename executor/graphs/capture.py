"""Captures one graph between two steps of a serving engine.

`torch.cuda.graph` waits for the device and empties caches, and fails if another thread of the process uses CUDA meanwhile. So a
capture here is thread-local, and always on the same stream: memory of a pool of graphs belongs to the stream that allocated it.
The garbage collector is off, because a graph that is collected ends a capture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class CaptureFailed(Exception):
    """A graph could not be captured; the engine goes on without it.

    Attributes:
        out_of_memory: whether the device had no memory for it.
    """

    def __init__(self, why: str, out_of_memory: bool) -> None:
        super().__init__(why)
        self.out_of_memory = out_of_memory


@dataclass(frozen=True)
class Captured:
    """A captured graph.

    Attributes:
        graph: the device's graph.
        size: the bytes of the device's memory that it took, as measured.
    """

    graph: Any
    size: int


class Recorder(Protocol):
    """What a capture needs of CUDA."""

    def free(self) -> int:
        """Return the device's free bytes."""

    def on_stream(self) -> Any:
        """Return a context in which work goes to the capture stream.

        The work is ordered after the work of steps before, and before that of steps after.
        """

    def wait(self) -> None:
        """Wait for the capture stream."""

    def begin(self) -> Any:
        """Begin a graph on the capture stream; return it."""

    def end(self, graph: Any) -> None:
        """End the graph."""


def capture(recorder: Recorder, prepare: Callable[[], Callable[[], None]], warm: bool) -> Captured:
    """Capture a graph.

    Args:
        recorder: CUDA.
        prepare: writes dummy inputs and returns the forward pass on them. The inputs of the step are written afterwards.
        warm: whether the forward pass runs once before it is captured, for the kernels that are not compiled yet.

    Raises:
        CaptureFailed: the device had no memory, or the forward pass does what a graph cannot hold.
    """
    free = recorder.free()
    try:
        with _no_collection(), recorder.on_stream():
            if warm:
                prepare()()
            forward = prepare()
            recorder.wait()
            graph = _recorded(recorder, forward)
    except torch.OutOfMemoryError as error:
        raise CaptureFailed(str(error), out_of_memory=True) from error
    except RuntimeError as error:
        raise CaptureFailed(str(error), out_of_memory=False) from error
    return Captured(graph, max(0, free - recorder.free()))


def _recorded(recorder: Recorder, forward: Callable[[], None]) -> Any:
    graph = recorder.begin()
    try:
        forward()
    except BaseException:
        try:
            recorder.end(graph)
        except RuntimeError:
            pass  # The capture is broken already; the first error says why.
        raise
    recorder.end(graph)
    return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CudaRecorder:
    """A worker's capture stream, and the pool of its graphs.

    Torch takes no graph into a pool again whose last graph is gone. So a pool of the recorder's own begins with a small graph
    that stays. A capture that CUDA breaks off leaves its pool unusable; later graphs go to a new pool.

    Args:
        device: of CUDA.
        pool: where graphs have their memory: the engine's own pool of graphs. None: a pool of the recorder's own.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device)
        self._random = torch.cuda.default_generators[self._index]
        self._pool = pool
        self._stays: list[torch.cuda.CUDAGraph] = []

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(main)
            main.wait_stream(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()

    def begin(self) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            small = self._begun()
            torch.zeros(1, device=self._device)
            self.end(small)
            self._stays.append(small)
        return self._begun()

    def _begun(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._random = torch.cuda.default_generators[self._index].clone_state()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except RuntimeError:
            self._broken()
            raise
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._broken()
            raise

    def _broken(self) -> None:
        """Leave the pool, and take the device's random numbers back from a graph that will not be."""
        self._pool = None
        torch.cuda.default_generators[self._index].graphsafe_set_state(self._random)
