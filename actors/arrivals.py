"""What the workers of a trace bring to its session: saved values, printed text, increments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from actors.failures import unavailable
from actors.increments import Arrived, Increments
from actors.saved import Saved
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb

# Seconds to wait for a blob after the engine has named it. A worker hands a blob over at about that time; later it is lost.
ADOPTION_SECONDS = 60.0


class Arrivals:
    """What the workers of one trace have brought, and what is still to come.

    Args:
        trace_id: the trace's id, as the client chose it.

    Attributes:
        blobs: the saved values by blob id.
        saved_bytes: the bytes of the saved values.
        increments: the increments that wait for the output of their step.
        refusal: why the trace may bring nothing more, or None.
    """

    def __init__(self, trace_id: str) -> None:
        self.blobs: dict[str, Saved] = {}
        self.saved_bytes = 0
        self.increments = Increments()
        self.refusal: pb.Failure | None = None
        self._trace_id = trace_id
        self._named: set[str] = set()
        self._logs = 0
        self._logs_expected = 0
        self._changed = asyncio.Condition()

    def restore(self, blobs: Mapping[str, Saved]) -> None:
        """Take the values of an ended trace."""
        self.blobs = dict(blobs)
        self.saved_bytes = sum(saved.size for saved in blobs.values())

    def expect_values(self, blob_ids: Iterable[str]) -> None:
        """Note saved values that must come."""
        self._named.update(blob_ids)

    def expect_logs(self, logs: int) -> None:
        """Note that blocks have printed `logs` texts more."""
        self._logs_expected += logs

    def take(self, blob_id: str, saved: Saved) -> None:
        """Take a saved value; `wake` then tells the calls that wait for it."""
        self.saved_bytes += saved.size
        self.blobs[blob_id] = saved

    def check_size(self, size: int, limit: int) -> None:
        """Refuse a saved value with which the trace would save more than it may.

        Args:
            size: bytes of the value.
            limit: bytes that the trace may save.
        """
        if self.saved_bytes + size > limit:
            message = (
                f"the trace saves more than it may: {self.saved_bytes + size} bytes, the limit is {limit}. Save fewer values, or "
                "parts of them"
            )
            raise ServiceFailure(failure(pb.ERROR_CODE_QUOTA_EXCEEDED, message))

    async def refuse(self, refusal: pb.Failure) -> None:
        """Note that the trace may bring nothing more."""
        self.refusal = refusal
        await self.wake()

    async def log(self) -> None:
        """Note that a printed text has come."""
        self._logs += 1
        await self.wake()

    async def increment(self, event: bytes) -> None:
        """Take a serialized event with an increment."""
        self.increments.add(Arrived(pb.Event.FromString(event).increment, event))
        await self.wake()

    async def wake(self) -> None:
        """Have all calls that wait here look again."""
        async with self._changed:
            self._changed.notify_all()

    async def blob(self, blob_id: str, running: Callable[[], bool]) -> Saved | None:
        """Return a saved value once it is here; None if it will never come.

        Args:
            blob_id: the value's blob id.
            running: whether the trace runs.
        """
        async with self._changed:
            while blob_id not in self.blobs and running() and self.refusal is None:
                await self._changed.wait()
        return self.blobs.get(blob_id)

    def check(self) -> None:
        """Raise a ServiceFailure if the trace may bring nothing more."""
        if self.refusal is not None:
            raise ServiceFailure(self.refusal)

    def drop_unnamed(self) -> None:
        """Drop values that no event names: the values of failed invokes."""
        for unnamed in self.blobs.keys() - self._named:
            self.saved_bytes -= self.blobs.pop(unnamed).size

    async def wait_for_all(self) -> None:
        """Wait until all that is to come is here."""
        await self.wait_for(lambda: self._named <= self.blobs.keys(), "a saved value")
        await self.wait_for(lambda: self._logs >= self._logs_expected, "what the blocks printed")

    async def wait_for(self, here: Callable[[], bool], what: str) -> None:
        """Wait until a message that the engine announced has come from the workers.

        Args:
            here: whether the message has come.
            what: what the message brings, for the error.

        Raises:
            ServiceFailure: the message did not come in time.
        """
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: here() or self.refusal is not None), ADOPTION_SECONDS
                )
            except TimeoutError:
                text = f"{what} did not arrive from the worker that ran the block"
                raise ServiceFailure(unavailable(text, self._trace_id)) from None
