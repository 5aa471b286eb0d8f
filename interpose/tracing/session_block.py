"""The block `with client.session()`: its traces leave large values on the server.

Inside the block, a name that a trace saved holds a `RemoteValue`. A later trace that reads the name gets the tensor from the
server's own store. At the end of the block, each of these names gets its tensor. The session itself is on the server: when
its client is gone, `client.session(id)` finds the session and its values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from interpose.contract.display import facts
from interpose.contract.errors import InterposeError, InvalidArgument, Unavailable
from interpose.contract.idioms import OF_SESSIONS
from interpose.contract.shown import shown
from interpose.modules.tree import Node
from interpose.results.job import Job
from interpose.results.session_names import Gathered, SessionNames
from interpose.rpc.session import Session
from interpose.rpc.threads import in_thread
from interpose.v1.service_pb2 import JOB_STATE_DONE, JobStatus, SessionDescription

_entered: ContextVar[tuple[SessionBlock, ...]] = ContextVar("interpose_sessions", default=())


class SessionBlock:
    """A session that keeps values on the server, for a `with`; made by `client.session`.

    Args:
        client: the client of the session.
        session: the session on the server.
        tree_of: gives the module tree of a served model.

    Attributes:
        names: the names and containers of the notebook that the session's traces assigned or changed.
    """

    def __init__(self, client: object, session: Session, tree_of: Callable[[str], Node]) -> None:
        self._client = client
        self._tree_of = tree_of
        self._session = session
        self._token: Token[tuple[SessionBlock, ...]] | None = None
        self.names = SessionNames()

    @property
    def id(self) -> str:
        """The session's id, for `client.session(id)` in any process of the same tenant."""
        return self._session.open()

    @property
    def session(self) -> Session:
        """The client's side of the session."""
        return self._session

    def __enter__(self) -> SessionBlock:
        self._refuse_twice()
        self._session.describe()  # opens the session, or raises NotFound for an unknown id
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Fetch the tensors of the names that the traces assigned, and close the session.

        After an interrupt, or when the server cannot be reached, the session stays open: its id finds it again.
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
        """Do the same as `__enter__`, on an event loop."""
        self._refuse_twice()
        await in_thread(self._session.describe)
        self._enter()

    async def exit_async(self, error: BaseException | None) -> None:
        """Do the same as `__exit__`, on an event loop."""
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
        """Leave the block; return the values to fetch, None if the session stays open."""
        assert self._token is not None
        _entered.reset(self._token)
        self._token = None
        gathered = self.names.take()
        if error is not None and (not isinstance(error, Exception) or isinstance(error, Unavailable)):
            return None
        return gathered

    def describe(self) -> SessionDescription:
        """Return the session's traces, its bytes on the server, and the limit of bytes."""
        return self._session.describe()

    def saved(self) -> dict[str, object]:
        """Return the saved values of the session's finished traces, by name.

        Large tensors are `RemoteValue`s. Where several traces saved a name, the value is that of the latest trace.

        Raises:
            NotFound: the server has no such session, or has closed it.
        """
        values: dict[str, object] = {}
        for status in self._session.describe().traces:
            if status.state == JOB_STATE_DONE:
                values.update(self._job(status).result(fetch=False))
        return values

    def traces(self) -> list[Job]:
        """Return the session's traces, also the running traces, in the order of submission."""
        return [self._job(status) for status in self._session.describe().traces]

    def _job(self, status: JobStatus) -> Job:
        return Job(self._session, status.session_id, status.trace_id, self._tree_of)

    def close(self) -> None:
        """End the session on the server, which drops the session's values.

        The server keeps the session's jobs until their retention time ends.
        """
        self._session.close()

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {OF_SESSIONS[name]}" if name in OF_SESSIONS else ""
            raise AttributeError(f"a session has no attribute {name!r}{hint}", name=name, obj=self)

    def __dir__(self) -> list[str]:
        return shown(self, ("enter_async", "exit_async", "names", "session"))

    def _repr_html_(self) -> str:
        state = "open" if self._session.id else "not open: write `with client.session() as s:`"
        return facts({"session": self._session.id or "no id yet", "state": state})

    def __repr__(self) -> str:
        return f"<interpose session {self._session.id or 'that is not open'}>"


def entered(client: object) -> SessionBlock | None:
    """Return the client's innermost running session block, None outside of a block."""
    return next((block for block in reversed(_entered.get()) if block._client is client), None)
