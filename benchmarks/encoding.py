"""Measure the time of a saved tensor from a worker's registry to a notebook.

A container holds 2,048 tensors. It travels with stacks, and as a value for each tensor, as it does to a client that cannot read
stacks. The time is that of the registry and of the encoder in the worker, and of the decoder in the notebook; nothing is sent
in between. The figures are microseconds of CPU time per tensor on one thread, the best of the rounds: other work makes a round
slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from executor.saves.collect import Limits, collect
from executor.saves.outbox import LocalOutbox
from executor.saves.registry import SaveRegistry
from executor.saves.reuse import EarlierTensors
from executor.saves.stream import SaveStream
from interpose.results.assembly import Assembly, blobs_of
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Blob
from interpose.wire.decoder import Decoder
from interpose.wire.resolver import Resolver

COUNT = 2048
LAYERS = 16
WIDTH = 2048
ROUNDS = 10
LIMITS = Limits(inline_bytes=16 * 1024, max_saved_bytes=1 << 40)

T = TypeVar("T")
Seconds = dict[str, float]


def run(*, rounds: int | None = None) -> dict[str, dict[str, float]]:
    """Return microseconds per tensor, by container.

    Args:
        rounds: rounds of each case.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: _figures(case, rounds or ROUNDS) for name, case in _CASES.items()}
    finally:
        torch.set_num_threads(threads)


def _figures(case: Callable[[bool], Seconds], rounds: int) -> dict[str, float]:
    best: Seconds = {}
    for _ in range(rounds):
        for stacks in (True, False):
            for part, seconds in case(stacks).items():
                name = part if stacks else f"{part} one by one"
                best[name] = min(best.get(name, seconds), seconds)
    return {name: 1e6 * seconds / COUNT for name, seconds in best.items()}


@dataclass
class _Trace:
    """A trace of one invoke, as `collect` and `SaveStream` see it."""

    stacks: bool
    id: str = "t"
    session: str = ""
    expected: int = 1
    remote: bool = False
    of_session: bool = False
    blame: bytes = b""
    saved_bytes: int = 0
    registry: SaveRegistry = field(default_factory=SaveRegistry)
    earlier: EarlierTensors = field(default_factory=lambda: EarlierTensors(_nothing_held))
    streamed: set[int] = field(default_factory=set)

    def captured(self) -> dict[int, int]:
        return {}


def _nothing_held(blob: Blob) -> Any:
    raise KeyError(blob.id)


class _Unbounded:
    """A budget without bounds."""

    step_seconds = 1.0

    def run(self, do: Callable[[], T], used: float, trace: bytes) -> tuple[T, float]:
        return do(), 0.0


def _rows(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, WIDTH).to(dtype) for _ in range(COUNT)]


def _rows_of_one(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return tensors as a loop in the tables leaves them: the rows of one tensor."""
    return list(torch.randn(COUNT, 1, WIDTH).to(dtype).unbind(0))


def _saved(
    make: Callable[[list[torch.Tensor]], Any],
    *,
    each: bool = False,
    dtype: torch.dtype = torch.float32,
    tensors: Callable[[torch.dtype], list[torch.Tensor]] = _rows,
) -> Any:
    """Return the case of a container that is saved at the end of its invoke.

    Args:
        make: makes the container.
        each: whether each tensor is saved by itself too.
        dtype: of the tensors.
        tensors: makes the tensors.
    """

    def case(stacks: bool) -> Seconds:
        trace, rows = _Trace(stacks), tensors(dtype)
        value = make(rows)
        blobs: dict[str, memoryview] = {}
        began = time.thread_time()
        for row in rows if each else ():
            trace.registry.save(row, None)
        trace.registry.save(value, None)
        [event] = collect(trace, 0, {"x": value}, {}, LIMITS, blobs.__setitem__)
        data = event.SerializeToString()
        encoded = time.thread_time()
        buffers = {name: np.frombuffer(bytes(block), np.uint8).copy() for name, block in blobs.items()}
        received = time.thread_time()
        saves = pb.Event.FromString(data).saves
        Decoder(saves.objects, get_blob=lambda blob: buffers.pop(blob.id)).decode(saves.names[0].value)
        return {"worker": encoded - began, "notebook": time.thread_time() - received}

    return case


def _streamed(stacks: bool) -> Seconds:
    """Save the outputs of 16 layers in each of 128 streamed steps."""
    trace, rows = _Trace(stacks), _rows()
    outbox = LocalOutbox()
    stream = SaveStream(trace, pb.Program(writes=["x"]), 0, LIMITS, _Unbounded(), outbox)
    value: list[list[torch.Tensor]] = trace.registry.save([], None)
    began = time.thread_time()
    for step, first in enumerate(range(0, COUNT, LAYERS)):
        value.append(rows[first : first + LAYERS])
        stream.step({"x": value}, step + 1, last=False)
    end = stream.end({"x": value}, COUNT // LAYERS).SerializeToString()
    encoded = time.thread_time()
    assembly = Assembly({}, Resolver())
    spent = 0.0
    for data in [*(data for _, data in outbox.increments), end]:
        increment = pb.Event.FromString(data).increment
        for blob in blobs_of(increment):
            assembly.buffers[blob.id] = np.frombuffer(outbox.blobs[blob.id], np.uint8).copy()
        received = time.thread_time()
        assembly.add(increment)
        spent += time.thread_time() - received
    return {"worker": encoded - began, "notebook": spent}


def _steps(rows: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [rows[first : first + LAYERS] for first in range(0, COUNT, LAYERS)]


_CASES: dict[str, Callable[[bool], Seconds]] = {
    "list, float32": _saved(list),
    "list, rows of one tensor": _saved(list, tensors=_rows_of_one),
    "list, a prompt and rows of one": _saved(lambda rows: [torch.zeros(64, WIDTH), *rows], tensors=_rows_of_one),
    "list, slice of rows of one": _saved(lambda rows: rows[1:], tensors=_rows_of_one),
    "list of 128 lists, rows of one": _saved(lambda rows: _steps(rows), tensors=_rows_of_one),
    "list, bfloat16": _saved(list, dtype=torch.bfloat16),
    "list, each tensor saved too": _saved(list, each=True),
    "tuple": _saved(tuple),
    "list of 128 lists": _saved(_steps),
    "dict of 16 lists": _saved(lambda rows: {layer: rows[layer::LAYERS] for layer in range(LAYERS)}),
    "dict": _saved(lambda rows: dict(enumerate(rows))),
    "list of 128 lists, streamed": _streamed,
}
