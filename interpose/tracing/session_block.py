"""`with client.session()`: traces whose large values stay on the server between them, and come to the notebook at the end.

Inside, a name that a trace saved holds a `RemoteValue`, and a block that reads it gets the tensor from the server's own store.
When the block of the session ends, each of these names gets its tensor. A session is on the server: when its client is
gone, `client.session(id)` finds it and what it holds.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from interpose import capture
from interpose.contract.errors import InterposeError, InvalidArgument, Unavailable
from interpose.program.session_variables import SessionVariables
from interpose.results.delivery import still_there
from interpose.results.job import Job
from interpose.rpc.remote import Fetching
from interpose.rpc.session import Session
from interpose.rpc.threads import in_thread
from interpose.v1.service_pb2 import JOB_STATE_DONE, JobStatus, SessionDescription

if TYPE_CHECKING:
    from interpose.tracing.client import Client


@dataclass(frozen=True)
class _Gathered:
    """What a session's block left on the server, at its end: containers, and names that still hold what was assigned."""

    containers: list[object]
    names: list[tuple[capture.Scope, str, object]]

    def fetch(self) -> list[object]:
        """Fetch what is in the containers; return what the names are to hold."""
        fetching = Fetching()
        for container in self.containers:
            fetching.value(container)
        return [fetching.value(value) for _, _, value in self.names]

    def assign(self, tensors: list[object]) -> None:
        """Give the names what was fetched for them; called where the block stands."""
        for (scope, name, value), tensor in zip(self.names, tensors, strict=True):
            if tensor is not value:
                scope.assign({name: tensor})


_entered: ContextVar[tuple[SessionBlock, ...]] = ContextVar("interpose_sessions", default=())


class SessionBlock:
    """A session whose values stay on the server; made by `client.session`, to be used in a `with` statement.

    Args:
        client: the connection.
        session: the session on the server.

    Attributes:
        variables: what its traces share.
    """

    def __init__(self, client: Client, session: Session) -> None:
        self._client = client
        self._session = session
        self._token: Token[tuple[SessionBlock, ...]] | None = None
        self._names: list[tuple[capture.Scope, str, object]] = []
        self._containers: list[object] = []
        self.variables = SessionVariables()

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

    def _left(self, error: BaseException | None) -> _Gathered | None:
        """The block is over; return what is to be fetched at its end, None if the session stays as it is."""
        assert self._token is not None
        _entered.reset(self._token)
        self._token = None
        self.variables = SessionVariables()
        names, self._names = self._names, []
        containers, self._containers = self._containers, []
        if error is not None and (not isinstance(error, Exception) or isinstance(error, Unavailable)):
            return None
        return _Gathered(containers, [one for one in names if _still_holds(*one)])

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
        return Job(self._session, status.session_id, status.trace_id, lambda name: self._client.model(name).tree)

    def close(self) -> None:
        """End the session on the server. Its values go; its background jobs stay until their retention time ends."""
        self._session.close()

    def assigned(self, scope: capture.Scope, names: dict[str, Any]) -> None:
        """Note that a trace assigned names, to be given their tensors at the end."""
        self._names.extend((scope, name, value) for name, value in names.items())

    def changed(self, container: object) -> None:
        """Note that a trace changed a list or dict of the caller's."""
        self._containers.append(container)

    def __repr__(self) -> str:
        return f"<interpose session {self._session.id or 'that is not open'}>"


def entered(client: Client) -> SessionBlock | None:
    """Return the innermost session of a client whose block is running here."""
    return next((block for block in reversed(_entered.get()) if block._client is client), None)


def _still_holds(scope: capture.Scope, name: str, value: object) -> bool:
    """Whether a name is there and holds what a trace assigned to it."""
    try:
        return still_there(scope) and scope.lookup(name) is value
    except KeyError:
        return False
