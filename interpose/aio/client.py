"""The client for asyncio: the methods of `Client`, awaited.

Traces are `async with` blocks, streams are `async for` loops. An `AsyncClient` holds a `Client`, and runs its blocking calls
in threads. The event loop reads the events of running traces itself.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from interpose.aio.handles import AsyncEditBlock, AsyncJob, AsyncSession, AsyncStandingEdit
from interpose.contract.display import Table
from interpose.contract.explanation import Explanation
from interpose.results.job import Job
from interpose.rpc.threads import in_thread
from interpose.tracing.client import DEFAULT_TIMEOUT, Client, connect, table_of
from interpose.tracing.edit import EDIT, check_name, listed
from interpose.tracing.generation import AsyncGeneration
from interpose.tracing.model import Model
from interpose.v1.service_pb2 import Limits, StatusReply


async def connect_async(
    address: str | None = None,
    api_key: str | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    progress: bool = True,
    ca: str | Path | None = None,
    certificate: tuple[str | Path, str | Path] | None = None,
) -> AsyncClient:
    """Connect to a server, for use on an event loop.

    Arguments and errors are as for `interpose.connect`.
    """
    client = await in_thread(
        lambda: connect(address, api_key, timeout=timeout, progress=progress, ca=ca, certificate=certificate),
        dropped=lambda client: client.close(),
    )
    return AsyncClient(client)


class AsyncModel(Model):
    """A served model of a client for asyncio: `async with model.trace(…) as tracer:`.

    The other methods are as for `Model`.
    """

    __slots__ = ()

    def edit(self, name: str | None = None, **options: Any) -> AsyncEditBlock:
        """Leave a block on the server as a standing edit: `async with model.edit("calm"):`.

        Arguments and errors are as for `Model.edit`.
        """
        return AsyncEditBlock(self, check_name(name, options)).watched(EDIT.replace("with", "async with", 1))

    def generate(self, prompt: Any = None, *, max_new_tokens: int | None = None, **options: Any) -> AsyncGeneration:
        """Generate text: `result = await model.generate("Hello", max_new_tokens=3)`.

        Arguments and errors are as for `Model.generate`.
        """
        made = self._generation(AsyncGeneration, prompt, max_new_tokens, options)
        return made.watched("write `result = await model.generate(…)`, or `async with model.generate(…) as tracer:`")

    def explain(  # type: ignore[override]
        self, block: Callable[..., object] | str, prompt: Any = (0,), **sampling: Any
    ) -> Awaitable[Explanation]:
        """Say in which tier each part of a block runs: `await model.explain(steer)`.

        Arguments and errors are as for `Model.explain`.
        """
        made, captured, scope = self._explained(block, prompt, sampling, sys._getframe(1))

        async def run() -> Explanation:
            await made.run_block_async(captured, scope)
            return made.explanation

        return run()

    async def edits(self) -> list[AsyncStandingEdit]:  # type: ignore[override]
        """Return the tenant's standing edits of this model, oldest first.

        Each edit has a name and the method `await edit.clear()`.
        """
        return await in_thread(listed, self, AsyncStandingEdit)

    async def clear_edits(self) -> int:  # type: ignore[override]
        """Drop all standing edits of the tenant for this model; return their number."""
        return await in_thread(super().clear_edits)

    def job_handle(self, job: Job) -> AsyncJob:
        """Return the object that `tracer.job` gives for a job; its methods are awaited."""
        return AsyncJob(job)


class AsyncModels(tuple[str, ...]):
    """Names of the served models; `await client.models()` gives a table of the models.

    Attributes:
        ask_async: asks the server for its status.
    """

    ask_async: Callable[[], Awaitable[StatusReply]]

    async def __call__(self) -> Table:
        """Return a table of the models: state, replicas, requests, adapters, and canonical values.

        As `Client.models()`.
        """
        return table_of(await self.ask_async())


class AsyncClient:
    """A connected client for asyncio; made by `connect_async`.

    It works on any event loop, and as an asynchronous context manager.

    Attributes:
        address, models, server_version, limits: as for `Client`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        client.awaited = client.own_session.awaited = True
        self.address: str = client.address
        self.models = AsyncModels(client.models)
        self.models.ask_async = self.status
        self.server_version: str = client.server_version
        self.limits: Limits = client.limits

    async def model(self, name: str | None = None) -> AsyncModel:
        """Return a served model; without a name, the only model of the server.

        Its traces are `async with model.trace(…) as tracer:`.

        Raises:
            NotFound: the server serves no model of that name.
            InvalidArgument: the server serves several models, and no name was given.
        """
        description = await in_thread(self._client.describe, name)
        await in_thread(self._client.known_packages)  # so that no block has to ask on the event loop
        return AsyncModel(self._client, description)

    def job(self, job_id: str) -> AsyncJob:
        """Return the job with an id (`tracer.job.id`); its methods are awaited.

        Raises:
            InvalidArgument: the text is not the id of a job.
        """
        return AsyncJob(self._client.job(job_id))

    def session(self, session_id: str = "") -> AsyncSession:
        """Return a session that keeps values on the server: `async with client.session() as s:`.

        The argument is as for `Client.session`.
        """
        return AsyncSession(self._client.session(session_id))

    async def jobs(self) -> Table:
        """Return the traces of this client's open sessions as a table; as `Client.jobs`."""
        return await in_thread(self._client.jobs)

    async def packages(self) -> Table:
        """Return the packages that blocks can import on the server as a table; as `Client.packages`."""
        return await in_thread(self._client.packages)

    async def status(self) -> StatusReply:
        """Return the server's report of its models, its sessions, and the usage of the tenants."""
        return await in_thread(self._client.status)

    async def tokenizer(self, model: str) -> Any:
        """Return a model's tokenizer; the first call fetches its files.

        `model.tokenizer` does the same, and blocks the event loop.
        """
        return await in_thread(self._client.tokenizer, model)

    async def close(self) -> None:
        """Close the session and the connection."""
        await in_thread(self._client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return repr(self._client).replace("client", "asyncio client", 1)
