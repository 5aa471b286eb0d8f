"""A segment of shared memory goes on without its name, so that nothing is left of it when its users end, however they do."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from executor.cluster.shared_memory import SHARED_MEMORY, forget_names, mapped_by


def test_a_queue_goes_on_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    writer = MessageQueue(1, 1, max_chunk_bytes=1 << 16, max_chunks=2)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    waiting = threading.Thread(target=writer.wait_until_ready)
    waiting.start()
    reader.wait_until_ready()
    waiting.join()
    file = SHARED_MEMORY / writer.buffer.shared_memory.name
    assert file in mapped_by([os.getpid()])
    forget_names([reader, None])
    assert file.exists(), "who only reads does not remove it"
    for _ in range(2):
        forget_names([writer])
        assert not file.exists() and file not in mapped_by([os.getpid()])
    for number in range(5):
        writer.enqueue({"step": number})
        assert reader.dequeue(timeout=5) == {"step": number}
    writer.shutdown()
    reader.shutdown()
    del writer, reader, waiting
    gc.collect()
    assert not unraisable
