"""Large values: 256 MB up and down, intact, in chunks, and never many times over in one process."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
import torch

import interpose
from interpose.v1 import service_pb2
from tests.e2e.service import RunningService
from tests.e2e.test_calls import trace

SIZE = 256 << 20


class Memory(threading.Thread):
    """Watches how far the memory of processes grows: their own, not the pages of the object store that they have mapped.

    Attributes:
        grown: bytes by process name, the most above the start.
    """

    def __init__(self, processes: list[psutil.Process]) -> None:
        super().__init__(daemon=True)
        self._start = {process: _own(process) for process in processes}
        self._ended = threading.Event()
        self.grown: dict[str, int] = {}

    def run(self) -> None:
        while not self._ended.wait(0.05):
            for process, start in self._start.items():
                try:
                    name = f"{process.name()} {process.pid}"
                    self.grown[name] = max(self.grown.get(name, 0), _own(process) - start)
                except psutil.Error:
                    continue

    def __enter__(self) -> Memory:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self.join()


def _own(process: psutil.Process) -> int:
    memory = process.memory_info()
    return memory.rss - memory.shared


@pytest.mark.timeout(300)
def test_saves_of_256_mb(service: RunningService, model: interpose.Model) -> None:
    rows = SIZE // 4 // 1024 // 8
    with model.trace("warm up"):
        hidden = model.model.layers[0].output[0].new_ones(8, rows, 1024).save()
    del hidden
    with Memory([*service.processes(), psutil.Process()]) as memory:
        with model.trace("one two three"):
            start = model.model.layers[0].output[0]
            parts = [start.new_full((rows, 1024), float(number)).save() for number in range(8)]
        time.sleep(0.2)
    assert sum(part.nbytes for part in parts) == SIZE
    for number, part in enumerate(parts):
        assert bool((part == number).all())
    worst = max(memory.grown.values())
    assert worst < 2 * SIZE, {name: grown >> 20 for name, grown in memory.grown.items() if grown > 16 << 20}


@pytest.mark.timeout(300)
def test_an_upload_of_256_mb(model: interpose.Model) -> None:
    big = torch.arange(SIZE // 4, dtype=torch.float32)
    with model.trace("one two three"):
        hidden = model.model.layers[0].output[0]
        total = big.double().sum().save()
        last = big[-3:].save()
    assert torch.equal(last, big[-3:])
    assert total == big.double().sum()


@pytest.mark.timeout(300)
def test_values_that_nobody_reads_stay_in_the_object_store(service: RunningService, session: str) -> None:
    """Ten calls of Fetch without a reader: no process holds more of the value than a window for each."""
    source = f"hidden = model.model.layers[0].output[0].new_ones({SIZE // 16}).save()\n"
    events = service.submit(trace(source), session)
    [saves] = [event.saves for event in events if event.WhichOneof("kind") == "saves"]
    [blob_id] = [value.tensor.blob.id for value in saves.objects.values if value.tensor.blob.id]
    held = service.object_store_bytes()
    with Memory([*service.processes("ingress"), *service.processes("ProxyActor")]) as memory:
        request = service_pb2.FetchRequest(session_id=session, blob_id=blob_id)
        calls = [service.stub.Fetch(request, timeout=120) for _ in range(10)]
        for call in calls:
            assert next(call).data
        time.sleep(2.0)
        held = service.object_store_bytes() - held
        for call in calls:
            call.cancel()
    assert held < 128 << 20, "what was asked for piled up in the object store"
    assert max(memory.grown.values()) < 128 << 20, {name: grown >> 20 for name, grown in memory.grown.items()}
