"""`with client.session()`: traces whose large values stay on the server between them, and come to the notebook at the end.

Inside, a name that a trace saved holds a `RemoteValue`, and a block that reads it gets the tensor from the server's own store.
When the block of the session ends, each of these names gets its tensor. A session is on the server: when its client is
gone, `client.session(id)` finds it and what it holds.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any

from interpose import capture
from interpose.delivery import still_there
from interpose.errors import InterposeError, InvalidArgument, Unavailable
from interpose.job import Job
from interpose.remote import Fetching
from interpose.session import Session
from interpose.v1.service_pb2 import JOB_STATE_DONE, JobStatus

if TYPE_CHECKING:
    from interpose.client import Client

_entered: ContextVar[tuple[SessionBlock, ...]] = ContextVar("interpose_sessions", default=())


class SessionBlock:
    """A session whose values stay on the server; made by `client.session`, to be used in a `with` statement.

    Args:
        client: the connection.
        session: the session on the server.
    """

    def __init__(self, client: Client, session: Session) -> None:
        self._client = client
        self._session = session
        self._token: Token[tuple[SessionBlock, ...]] | None = None
        self._names: list[tuple[capture.Scope, str, object]] = []
        self._containers: list[object] = []

    @property
    def id(self) -> str:
        """What `client.session(id)` finds it by, in any process of the same tenant."""
        return self._session.open()

    @property
    def session(self) -> Session:
        """The connection to it."""
        return self._session

    def __enter__(self) -> SessionBlock:
        if self._token is not None:
            raise InvalidArgument("this session's block is running already")
        self._session.describe()  # opens it, or says that there is none of that id
        self._token = _entered.set((*_entered.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Fetch what the traces assigned and close the session.

        After an interrupt, or when the server could not be reached, the session is left as it is: its id finds it again.
        """
        assert self._token is not None
        _entered.reset(self._token)
        self._token = None
        names, self._names = self._names, []
        containers, self._containers = self._containers, []
        if error is not None and (not isinstance(error, Exception) or isinstance(error, Unavailable)):
            return
        try:
            self._fetch_all(names, containers)
        except InterposeError:
            if error is None:
                raise
            return
        self.close()

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

    def _fetch_all(self, names: list[tuple[capture.Scope, str, object]], containers: list[object]) -> None:
        fetching = Fetching()
        for container in containers:
            fetching.value(container)
        for scope, name, value in names:
            try:
                unchanged = still_there(scope) and scope.lookup(name) is value
            except KeyError:
                continue
            if unchanged:
                tensor = fetching.value(value)
                if tensor is not value:
                    scope.assign({name: tensor})

    def __repr__(self) -> str:
        return f"<interpose session {self._session.id or 'that is not open'}>"


def entered(client: Client) -> SessionBlock | None:
    """Return the innermost session of a client whose block is running here."""
    return next((block for block in reversed(_entered.get()) if block._client is client), None)
