"""Jobs, sessions and standing edits of a client for asyncio, with awaited methods.

Each method runs a method of the plain object in a thread. Only the assignment of names runs on the event loop, because the
caller's frames are there.
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
    """A job: `tracer.job` of a trace with `blocking=False`, or `client.job(id)`.

    Methods and errors are as for `Job`.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def id(self) -> str:
        """The job's id, for `client.job(id)` in any process of the same tenant."""
        return self._job.id

    async def status(self) -> JobStatus:
        """Return the state of the job."""
        return await in_thread(self._job.status)

    async def cancel(self) -> bool:
        """Cancel the job; return whether the job was running."""
        return await in_thread(self._job.cancel)

    async def forget(self) -> None:
        """Cancel the job if it runs, and drop its results from the server."""
        await in_thread(self._job.forget)

    async def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the job, then assign its saved values.

        Cancelling the task ends the waiting, not the job.
        """
        self._job.deliver(await _waiting(lambda following: self._job.arrive(timeout, following)))

    async def result(self, timeout: float | None = None, *, fetch: bool | None = None) -> JobResult:
        """Wait for the end of the job and return its saved values and the engine's output."""
        return await _waiting(lambda following: self._job.result(timeout, fetch=fetch, following=following))

    def __repr__(self) -> str:
        return repr(self._job).replace("job", "asyncio job", 1)


class AsyncSession:
    """A session that keeps values on the server: `async with client.session() as s:`.

    The other methods are as for `SessionBlock`.
    """

    def __init__(self, block: SessionBlock) -> None:
        self._block = block

    @property
    def id(self) -> str:
        """The session's id, for `client.session(id)` in any process of the same tenant.

        It is "" before the session's block begins.
        """
        return self._block.session.id

    async def __aenter__(self) -> AsyncSession:
        await self._block.enter_async()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Fetch the tensors of the names that the traces assigned, and close the session."""
        await self._block.exit_async(error)

    async def saved(self) -> dict[str, object]:
        """Return the saved values of the session's finished traces, by name.

        Large tensors are `RemoteValue`s.
        """
        return await in_thread(self._block.saved)

    async def traces(self) -> list[AsyncJob]:
        """Return the session's traces, also the running traces, in the order of submission."""
        return [AsyncJob(job) for job in await in_thread(self._block.traces)]

    async def describe(self) -> SessionDescription:
        """Return the server's description of the session: its traces and its bytes."""
        return await in_thread(self._block.describe)

    async def close(self) -> None:
        """End the session on the server, which drops the session's values.

        The server keeps the session's jobs until their retention time ends.
        """
        await in_thread(self._block.close)

    def __repr__(self) -> str:
        return repr(self._block).replace("session", "asyncio session", 1)


class AsyncStandingEdit(StandingEdit):
    """An edit that the server keeps; `await model.edits()` lists the edits.

    The attributes are as for `StandingEdit`.
    """

    async def clear(self) -> bool:  # type: ignore[override]
        """Drop the edit from the server; return whether the server had it.

        Requests that are running keep the edit.
        """
        return await in_thread(super().clear)


class AsyncEditBlock(EditBlock):
    """The block of an edit: `async with model.edit("calm") as edit:`.

    The other methods are as for `EditBlock`.
    """

    async def clear(self) -> bool:  # type: ignore[override]
        """Drop the edit from the server; return whether the server had it.

        Requests that are running keep the edit.
        """
        return await in_thread(super().clear)


async def _waiting(call: Callable[[Callable[[Stream], None]], T]) -> T:
    """Run a call that waits for a job; cancelling the task ends the call, not the job."""
    followed: list[Stream] = []
    try:
        return await in_thread(call, followed.append)
    except asyncio.CancelledError:
        for stream in followed:
            stream.cancel()
        raise
