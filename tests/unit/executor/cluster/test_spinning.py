"""Readers of vLLM's queues sleep soon where models run on CPUs, and lose no message."""

from __future__ import annotations

import threading
import time

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.platforms import current_platform

from executor.cluster.spinning import spin_briefly

PAUSE = 0.3  # seconds between two messages
MESSAGES = 2000


@pytest.mark.parametrize("on_cpus", [True, False])
def test_a_reader_sleeps_between_messages(on_cpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on_cpus)
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    spin_briefly([reader])
    came: list[int] = []
    spent: list[float] = []

    def read() -> None:
        reader.wait_until_ready()
        came.append(reader.dequeue(timeout=30))
        began = time.thread_time()
        came.append(reader.dequeue(timeout=30))
        spent.append(time.thread_time() - began)
        while len(came) < MESSAGES:
            came.append(reader.dequeue(timeout=30))

    thread = threading.Thread(target=read)
    thread.start()
    writer.wait_until_ready()
    writer.enqueue(0)
    time.sleep(PAUSE)
    for number in range(1, MESSAGES):
        writer.enqueue(number)
    thread.join(60)
    assert came == list(range(MESSAGES))
    if on_cpus:
        assert spent[0] < PAUSE / 4
    else:
        assert reader._spin_condition.busy_loop_s >= PAUSE, "vLLM's own time"


def test_a_message_that_wakes_nobody_is_read_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket that wakes a reader drops what follows within a millisecond; vLLM's own readers look after five seconds."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    spin_briefly([reader])
    late: list[float] = []

    def read() -> None:
        reader.wait_until_ready()
        for _ in range(2):
            sent = reader.dequeue(timeout=30)
            late.append(time.monotonic() - sent)

    thread = threading.Thread(target=read)
    thread.start()
    writer.wait_until_ready()
    writer.enqueue(time.monotonic())
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)  # as if it had been dropped
    time.sleep(0.1)
    writer.enqueue(time.monotonic())
    thread.join(60)
    assert len(late) == 2
    assert late[1] < 2.0, "a machine that is busy with something else included"
