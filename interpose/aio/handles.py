"""Jobs, sessions and standing edits of a client for asyncio: the same objects, their methods awaited.

Nothing is done here twice: each method runs that of the object underneath in a thread of its own, and what has to happen
where the caller's names are, assigning them, happens on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from interpose.results.job import Job, JobResult, JobStatus
from interpose.rpc.channel import Stream
from interpose.rpc.threads import in_thread
from interpose.tracing.edit import EditBlock, StandingEdit
from interpose.tracing.session_block import SessionBlock
from interpose.v1.service_pb2 import SessionDescription

T = TypeVar("T")


class AsyncJob:
    """A background job; `tracer.job` of a trace with `blocking=False`, or `client.job(id)`. Methods and errors as of `Job`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def id(self) -> str:
        """What `client.job(id)` finds it by, in any process of the same tenant."""
        return self._job.id

    async def status(self) -> JobStatus:
        """Return how the job is."""
        return await in_thread(self._job.status)

    async def cancel(self) -> bool:
        """Cancel the job; return whether it was running."""
        return await in_thread(self._job.cancel)

    async def forget(self) -> None:
        """Cancel the job if it runs, and have the server drop what it saved."""
        await in_thread(self._job.forget)

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until the job has ended, then assign what it saved. Cancelling the task ends the waiting, not the job."""
        self._job.deliver(await _waiting(lambda following: self._job.arrive(timeout, following)))

    async def result(self, timeout: float | None = None, *, fetch: bool | None = None) -> JobResult:
        """Wait until the job has ended and return what it saved and generated."""
        return await _waiting(lambda following: self._job.result(timeout, fetch=fetch, following=following))

    def __repr__(self) -> str:
        return repr(self._job).replace("job", "asyncio job", 1)


class AsyncSession:
    """A session whose values stay on the server: `async with client.session() as s:`. Everything else as of `SessionBlock`."""

    def __init__(self, block: SessionBlock) -> None:
        self._block = block

    @property
    def id(self) -> str:
        """What `client.session(id)` finds it by, in any process of the same tenant; "" before its block has begun."""
        return self._block.session.id

    async def __aenter__(self) -> AsyncSession:
        await self._block.enter_async()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Fetch what the traces assigned and close the session."""
        await self._block.exit_async(error)

    async def saved(self) -> dict[str, object]:
        """Return what the session's finished traces saved, by name, large tensors as `RemoteValue`s."""
        return await in_thread(self._block.saved)

    async def traces(self) -> list[AsyncJob]:
        """Return the session's traces, in the order they were submitted, running ones too."""
        return [AsyncJob(job) for job in await in_thread(self._block.traces)]

    async def describe(self) -> SessionDescription:
        """Return what the session holds on the server."""
        return await in_thread(self._block.describe)

    async def close(self) -> None:
        """End the session on the server. Its values go; its background jobs stay until their retention time ends."""
        await in_thread(self._block.close)

    def __repr__(self) -> str:
        return repr(self._block).replace("session", "asyncio session", 1)


class AsyncStandingEdit(StandingEdit):
    """An edit that the server keeps; `await model.edits()` lists them. Attributes as of `StandingEdit`."""

    async def clear(self) -> bool:  # type: ignore[override]
        """Drop it from the server; requests that run already keep it. Returns whether it was there."""
        return await in_thread(super().clear)


class AsyncEditBlock(EditBlock):
    """The block of an edit: `async with model.edit("calm") as edit:`. Everything else as of `EditBlock`."""

    async def clear(self) -> bool:  # type: ignore[override]
        """Drop it from the server; requests that run already keep it. Returns whether it was there."""
        return await in_thread(super().clear)


async def _waiting(call: Callable[[Callable[[Stream], None]], T]) -> T:
    """Run what waits for a job; when the task is cancelled, it stops following the job, which goes on."""
    followed: list[Stream] = []
    try:
        return await in_thread(call, followed.append)
    except asyncio.CancelledError:
        for stream in followed:
            stream.cancel()
        raise
