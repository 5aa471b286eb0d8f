"""`with client.session()`: traces whose large values stay on the server between them, and come to the notebook at the end.

Inside, a name that a trace saved holds a `RemoteValue`, and a block that reads it gets the tensor from the server's own store.
When the block of the session ends, each of these names gets its tensor. A session is on the server: when its client is
gone, `client.session(id)` finds it and what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType

from interpose.contract.errors import InterposeError, InvalidArgument, Unavailable
from interpose.modules.envoy import Node
from interpose.results.job import Job
from interpose.results.session_names import Gathered, SessionNames
from interpose.rpc.session import Session
from interpose.rpc.threads import in_thread
from interpose.v1.service_pb2 import JOB_STATE_DONE, JobStatus, SessionDescription

_entered: ContextVar[tuple[SessionBlock, ...]] = ContextVar("interpose_sessions", default=())


class SessionBlock:
    """A session whose values stay on the server; made by `client.session`, to be used in a `with` statement.

    Args:
        client: the client that it belongs to.
        session: the session on the server.
        tree_of: gives the module tree of a served model.

    Attributes:
        names: what its traces left in the notebook.
    """

    def __init__(self, client: object, session: Session, tree_of: Callable[[str], Node]) -> None:
        self._client = client
        self._tree_of = tree_of
        self._session = session
        self._token: Token[tuple[SessionBlock, ...]] | None = None
        self.names = SessionNames()

    @property
    def id(self) -> str:
        """What `client.session(id)` finds it by, in any process of the same tenant."""
        return self._session.open()

    @property
    def session(self) -> Session:
        """The connection to it."""
        return self._session

    def __enter__(self) -> SessionBlock:
        self._refuse_twice()
        self._session.describe()  # opens it, or says that there is none of that id
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Fetch what the traces assigned and close the session.

        After an interrupt, or when the server could not be reached, the session is left as it is: its id finds it again.
        """
        gathered = self._left(error)
        if gathered is None:
            return
        try:
            gathered.assign(gathered.fetch())
        except InterposeError:
            if error is None:
                raise
            return
        self.close()

    async def enter_async(self) -> None:
        """`__enter__`, on an event loop."""
        self._refuse_twice()
        await in_thread(self._session.describe)
        self._enter()

    async def exit_async(self, error: BaseException | None) -> None:
        """`__exit__`, on an event loop."""
        gathered = self._left(error)
        if gathered is None:
            return
        try:
            gathered.assign(await in_thread(gathered.fetch))
        except InterposeError:
            if error is None:
                raise
            return
        await in_thread(self.close)

    def _refuse_twice(self) -> None:
        if self._token is not None:
            raise InvalidArgument("this session's block is running already")

    def _enter(self) -> None:
        self._token = _entered.set((*_entered.get(), self))

    def _left(self, error: BaseException | None) -> Gathered | None:
        """The block is over; return what is to be fetched at its end, None if the session stays as it is."""
        assert self._token is not None
        _entered.reset(self._token)
        self._token = None
        gathered = self.names.take()
        if error is not None and (not isinstance(error, Exception) or isinstance(error, Unavailable)):
            return None
        return gathered

    def describe(self) -> SessionDescription:
        """Return what the session holds on the server: its traces, and how many bytes of how many."""
        return self._session.describe()

    def saved(self) -> dict[str, object]:
        """Return what the session's finished traces saved, by name, large tensors as `RemoteValue`s; the latest of a name wins.

        Raises:
            NotFound: there is no such session (any more).
        """
        values: dict[str, object] = {}
        for status in self._session.describe().traces:
            if status.state == JOB_STATE_DONE:
                values.update(self._job(status).result(fetch=False))
        return values

    def traces(self) -> list[Job]:
        """Return the session's traces, in the order they were submitted, running ones too."""
        return [self._job(status) for status in self._session.describe().traces]

    def _job(self, status: JobStatus) -> Job:
        return Job(self._session, status.session_id, status.trace_id, self._tree_of)

    def close(self) -> None:
        """End the session on the server. Its values go; its background jobs stay until their retention time ends."""
        self._session.close()

    def __repr__(self) -> str:
        return f"<interpose session {self._session.id or 'that is not open'}>"


def entered(client: object) -> SessionBlock | None:
    """Return the innermost session of a client whose block is running here."""
    return next((block for block in reversed(_entered.get()) if block._client is client), None)
