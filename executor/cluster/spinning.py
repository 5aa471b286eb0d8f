"""How a process of an engine waits for another's message where models run on CPUs.

vLLM's processes look for messages without a pause, until nothing has come for a second. So an engine core spins for as long as
its workers compute. On CPUs the workers, and all other processes of the node, need that processor.

A process that sleeps is woken over a socket. The socket drops a message that follows another within about a millisecond:
it holds one, and what it holds is counted once a millisecond. vLLM looks by itself after five seconds. So in the first second of
a wait a process here looks by itself, after sleeps that grow with the wait. A message waits for an eighth of the time that the
reader has waited, and for a millisecond at most.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

SPINNING = 0.0002  # seconds of a wait without a sleep
PART = 8  # of the wait until now that a sleep takes is one in so many
NAP = 1  # milliseconds that a process sleeps at most while messages come
NAPPING = 1.0  # seconds of a wait until a sleep has no end; a single message then is not dropped


def spin_briefly(queues: Iterable[MessageQueue]) -> None:
    """Have this process sleep soon where it waits at queues, if models run on CPUs here.

    Args:
        queues: that this process reads. Queues from other nodes never spin.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for queue in queues:
            if queue._spin_condition is not None:
                queue._spin_condition.busy_loop_s = 0.0
                queue._spin_condition.poller = Naps(queue._spin_condition)


class Naps:
    """The poller of a queue's wait, whose sleeps are short while messages come.

    Args:
        condition: of the queue.
    """

    def __init__(self, condition: SpinCondition) -> None:
        self._condition = condition
        self._poller = condition.poller
        self._last = 0.0  # when the message before this wait was read
        self._began = 0.0

    def poll(self, timeout: int | None = None) -> list[tuple[object, int]]:
        """Wait for at most `timeout` milliseconds, or until it is time to look for a message.

        Returns the sockets that have something: pairs of socket and event.
        """
        now = time.monotonic()
        if self._last != self._condition.last_read:
            self._last, self._began = self._condition.last_read, now
        waited = now - self._began
        if waited < SPINNING:
            os.sched_yield()
            timeout = 0
        elif waited < PART * NAP / 1000:
            time.sleep(waited / PART)
            timeout = 0
        elif waited < NAPPING:
            timeout = NAP if timeout is None else min(timeout, NAP)
        found: list[tuple[object, int]] = self._poller.poll(timeout=timeout)
        return found
