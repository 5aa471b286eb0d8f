"""A connection to one server: the handshake, the served models, and the sessions."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from interpose.contract.display import Table, facts
from interpose.contract.errors import InvalidArgument, VersionMismatch
from interpose.contract.idioms import OF_CLIENTS
from interpose.contract.packages import Packages
from interpose.contract.shown import shown
from interpose.contract.version import PROTOCOL, PYTHON_VERSION, VERSION
from interpose.modules.tree import Node, tree_of
from interpose.program.libraries import Libraries
from interpose.results.job import Job, JobStatus
from interpose.rpc import tokenizers
from interpose.rpc.channel import Transport
from interpose.rpc.progress import Progress
from interpose.rpc.session import Session
from interpose.tracing.model import Model
from interpose.tracing.session_block import SessionBlock, entered
from interpose.v1.model_pb2 import ModelDescription
from interpose.v1.service_pb2 import (
    DescribeModelRequest,
    HelloReply,
    HelloRequest,
    Limits,
    ListPackagesRequest,
    StatusReply,
    StatusRequest,
)

ADDRESS_VARIABLE = "INTERPOSE_ADDRESS"
API_KEY_VARIABLE = "INTERPOSE_API_KEY"
DEFAULT_TIMEOUT = 60.0


def connect(
    address: str | None = None,
    api_key: str | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    progress: bool = True,
    ca: str | Path | None = None,
    certificate: tuple[str | Path, str | Path] | None = None,
) -> Client:
    """Connect to a server.

    Args:
        address: "host:port" or "grpc://host:port"; "grpcs://…" for TLS. Default: the variable INTERPOSE_ADDRESS.
        api_key: default: the variable INTERPOSE_API_KEY.
        timeout: seconds, for calls with a quick reply. A trace has no such limit.
        progress: whether long transfers and generations show a progress bar (where tqdm is installed).
        ca: for TLS, a PEM file with the certificates to trust. Default: the variable INTERPOSE_CA, else grpc's certificates.
        certificate: for a server that asks for it, PEM files with the client's certificate and its key. Default: the variables
            INTERPOSE_CERTIFICATE and INTERPOSE_CERTIFICATE_KEY.

    Raises:
        InvalidArgument: there is no address, or it is not a valid address; or a file cannot be read.
        Unavailable: no server answers at the address.
        Unauthenticated: the server does not know the key.
        VersionMismatch: client and server speak no common protocol.
    """
    address = address or os.environ.get(ADDRESS_VARIABLE)
    if not address:
        raise InvalidArgument(f'which server? write interpose.connect("localhost:9000") or set {ADDRESS_VARIABLE}')
    key = api_key if api_key is not None else os.environ.get(API_KEY_VARIABLE, "")
    transport = Transport(address, key, timeout, ca=ca, certificate=certificate)
    try:
        return Client(transport, progress=progress)
    except BaseException:
        transport.close()
        raise


class Models(tuple[str, ...]):
    """Names of the served models; a call gives a table of the models.

    Attributes:
        ask: asks the server for its status.
    """

    ask: Callable[[], StatusReply]

    def __call__(self) -> Table:
        """Return a table of the models: state, replicas, requests, adapters, and canonical values.

        `client.models()[0]["refused"]` has the reason of each canonical value that layers of the first model do not have.
        """
        return table_of(self.ask())


def table_of(status: StatusReply) -> Table:
    """Return a table of the models in a server's report."""
    rows = [
        {
            "model": one.name,
            "state": one.state,
            "replicas": one.replicas,
            "running": one.running,
            "waiting": one.waiting,
            "adapters": list(one.adapters),
            "layers": one.layers or None,
            "views": list(one.views),
            "refused": {
                f"{view.name}{'' if view.layers == one.layers else f' (of {view.layers})'}": view.reason
                for view in one.refused
            },
        }
        for one in status.models
    ]
    return Table.of("served models", rows)


class Client:
    """A connected client; made by `connect`, usable as a context manager.

    Attributes:
        address: the server's address, "host:port".
        models: names of the served models; `client.models()` is a table of the models with their states.
        server_version: the server's package version.
        limits: the limits of the server.
        awaited: whether the client serves an event loop, which it must not block.
        own_session: the session of traces outside of `client.session()`.
        libraries: what the server has of this Python's libraries.
    """

    def __init__(self, transport: Transport, *, progress: bool) -> None:
        self._transport = transport
        self.awaited = False
        hello = _hello(transport)
        self.address = transport.address
        self.models = Models(hello.models)
        self.models.ask = self.status
        self.server_version: str = hello.server_version
        self.limits: Limits = hello.limits
        self.progress = Progress(progress)
        self.own_session = Session(transport, self.limits, self.progress)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._tokenizers: dict[str, Any] = {}
        self._packages: list[Packages | None] = []  # the server's, once it was asked
        self.libraries = Libraries(self.known_packages)

    def model(self, name: str | None = None) -> Model:
        """Return a served model; without a name, the only model of the server.

        Raises:
            NotFound: the server serves no model of that name.
            InvalidArgument: the server serves several models, and no name was given.
        """
        return Model(self, self.describe(name))

    def describe(self, name: str | None = None) -> ModelDescription:
        """Return the description of a served model.

        The name and the errors are as for `model`.
        """
        if name is None and len(self.models) > 1:
            raise InvalidArgument(
                f"the server serves {', '.join(self.models)}; say which: client.model({self.models[0]!r})",
                suggestions=self.models,
            )
        description: ModelDescription = self._transport.unary("DescribeModel", DescribeModelRequest(model=name or ""))
        return description

    def tree_of(self, model: str) -> Node:
        """Return the module tree of a served model by its name."""
        return tree_of(self.describe(model))

    def job(self, job_id: str) -> Job:
        """Return the job with an id (`tracer.job.id`).

        Any process of the same tenant may have started the job.

        Raises:
            InvalidArgument: the text is not the id of a job.
        """
        return Job.found(self.own_session, job_id, self.tree_of)

    def jobs(self) -> Table:
        """Return the traces of this client's open sessions as a table, the latest first.

        `client.job(row["id"])` is the job of a row. The jobs of other processes are found by their ids alone.
        """
        found = [status for session in self._open_sessions() for status in session.describe().traces]
        found.sort(key=lambda status: status.seconds_since_submitted)
        rows = [{"id": f"{one.session_id}/{one.trace_id}", **JobStatus.from_message(one).rows()} for one in found]
        return Table.of(f"traces of {self.address}", rows)

    def _open_sessions(self) -> list[Session]:
        known = [self.own_session, *self._sessions]
        return [session for session in known if session.id]

    @property
    def current_session(self) -> Session:
        """The session of a trace that starts here now."""
        block = entered(self)
        return self.own_session if block is None else block.session

    def session(self, session_id: str = "") -> SessionBlock:
        """Return a session that keeps values on the server: `with client.session() as s:`.

        Inside the block, a large tensor that a trace saved is a `RemoteValue`. Later traces of the session use the tensor on
        the server. At the end of the block, the client fetches the tensors into the names that hold them, and closes the
        session.

        Args:
            session_id: the id (`s.id`) of a session that is open already. Any process of the same tenant may have opened it.
                `s.saved()` gives its saved values.
        """
        session = Session(self._transport, self.limits, self.progress, kept=True, session_id=session_id)
        session.awaited = self.awaited
        self._sessions.add(session)
        return SessionBlock(self, session, self.tree_of)

    def call(self, method: str, request: Any) -> Any:
        """Call a method of the server that has one reply."""
        return self._transport.unary(method, request)

    def status(self) -> StatusReply:
        """Return the server's report of its models, its sessions, and the usage of the tenants."""
        return self._transport.unary("Status", StatusRequest())

    def packages(self) -> Table:
        """Return the packages that blocks can import on the server as a table, with versions.

        The code of other libraries is sent as source, where it is Python: import them above the block.

        Raises:
            InvalidArgument: the server is older than this call.
        """
        found = self.known_packages()
        if found is None:
            raise InvalidArgument(f"the server (interpose {self.server_version}) does not say which packages it has")
        return found.table()

    def known_packages(self) -> Packages | None:
        """Return the server's packages, asked for once; None if the server does not say."""
        with self._lock:
            if not self._packages:
                try:
                    reply = self._transport.unary("ListPackages", ListPackagesRequest())
                    self._packages.append(Packages.of(reply))
                except VersionMismatch:  # the server has no such call
                    self._packages.append(None)
            return self._packages[0]

    def tokenizer(self, model: str) -> Any:
        """Return a model's tokenizer; the first call fetches its files."""
        with self._lock:
            if model not in self._tokenizers:
                self._tokenizers[model] = tokenizers.load(self._transport, model)
            return self._tokenizers[model]

    def close(self) -> None:
        """Close the session and the connection.

        Jobs go on. The server keeps their results until the retention time ends.
        """
        self.own_session.close()
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {OF_CLIENTS[name]}" if name in OF_CLIENTS else ""
            raise AttributeError(f"a client has no attribute {name!r}{hint}", name=name, obj=self)

    def __dir__(self) -> list[str]:
        return shown(
            self,
            (
                "awaited",
                "call",
                "current_session",
                "describe",
                "known_packages",
                "libraries",
                "own_session",
                "progress",
                "tree_of",
            ),
        )

    def _repr_html_(self) -> str:
        return facts({"client of": self.address, "models": ", ".join(self.models), "server": self.server_version})

    def __repr__(self) -> str:
        return f"<interpose client of {self.address}: {', '.join(self.models) or 'no models'}>"


def _hello(transport: Transport) -> HelloReply:
    """Return the server's answer to Hello.

    Raises:
        VersionMismatch: client and server speak no common protocol.
    """
    request = HelloRequest(protocol=PROTOCOL, client_version=VERSION, python_version=PYTHON_VERSION)
    reply = transport.unary("Hello", request)
    if reply.oldest_protocol > PROTOCOL:
        raise VersionMismatch(
            f"upgrade this client (interpose {VERSION}, protocol {PROTOCOL}): the server at {transport.address} (interpose "
            f"{reply.server_version}) speaks protocol {reply.oldest_protocol} or newer: pip install -U interpose"
        )
    if reply.protocol < PROTOCOL:
        raise VersionMismatch(
            f"upgrade the server at {transport.address} (interpose {reply.server_version}, protocol {reply.protocol}): this "
            f"client (interpose {VERSION}) speaks protocol {PROTOCOL}; or install the client that matches it: "
            f"pip install interpose=={reply.server_version}"
        )
    return reply
