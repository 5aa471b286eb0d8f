"""The gRPC channel to one server: addresses, credentials, and calls.

Errors of grpc become errors of `interpose`. The rest of the client uses no grpc channel.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from interpose.contract.errors import InvalidArgument, Unavailable
from interpose.contract.version import VERSION
from interpose.rpc.grpc_errors import from_rpc_error
from interpose.rpc.reader import Arrivals
from interpose.rpc.spans import Metadata
from interpose.v1 import service_pb2_grpc
from interpose.v1.trace_pb2 import Event

DEFAULT_PORT = 9000
# Files of certificates, where `connect` is given none.
CA_VARIABLE = "INTERPOSE_CA"
CERTIFICATE_VARIABLE, CERTIFICATE_KEY_VARIABLE = "INTERPOSE_CERTIFICATE", "INTERPOSE_CERTIFICATE_KEY"
_MIB = 1 << 20
_THREADS = 32
# By default, a server accepts a ping without data every five minutes, and closes the connection of a client that sends more.
_KEEPALIVE_MS = 330_000
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * _MIB),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.primary_user_agent", f"interpose/{VERSION}"),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


def parse_address(address: str) -> tuple[str, bool]:
    """Return "host:port" and whether the connection is encrypted.

    Raises:
        InvalidArgument: the address has none of the forms "host[:port]", "grpc://…" and "grpcs://…".
    """
    scheme, separator, rest = address.strip().partition("://")
    if not separator:
        scheme, rest = "grpc", scheme
    if scheme not in ("grpc", "grpcs"):
        raise InvalidArgument(
            f"{address!r} is not an address of a server: write host:port, grpc://host:port or grpcs://…"
        )
    rest = rest.rstrip("/")
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s/:@]+)(:\d{1,5})?", rest):
        raise InvalidArgument(
            f"{address!r} is not an address of a server: write host:port, e.g. localhost:{DEFAULT_PORT}"
        )
    if not re.search(r":\d+$", rest):
        rest += ":443" if scheme == "grpcs" else f":{DEFAULT_PORT}"
    return rest, scheme == "grpcs"


class Stream:
    """A call with a stream of replies, which starts when its messages are read.

    Errors of grpc become errors of `interpose`.
    """

    def __init__(self, start: Callable[[], Any], pool: ThreadPoolExecutor, address: str) -> None:
        self._start = start
        self._pool = pool
        self._address = address
        self._lock = threading.Lock()
        self._call: Any = None
        self._cancelled = False

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the messages in this thread, which must not be the main thread.

        The events of a bundle come one by one. An interrupt in the main thread could leave grpc's locks held.
        """
        with _mapped(self._address):
            call = self._start()
            with self._lock:
                self._call = call
                if self._cancelled:
                    call.cancel()
            for message in call:
                # Ray Serve sends a status only after a message. So a call that fails at once has an empty message first.
                if isinstance(message, Event) and message.HasField("bundle"):
                    yield from message.bundle.events
                elif message.ByteSize():
                    yield message

    def events(self) -> Arrivals:
        """Start the call and read its messages ahead, in a new thread.

        Any thread or an event loop takes the messages.
        """
        return Arrivals(lambda: iter(self))

    def cancel(self) -> None:
        """Cancel the call; a call that has ended is left alone."""
        with self._lock:
            self._cancelled = True
            call = self._call
        if call is not None:
            _submit(self._pool, call.cancel)


class Transport:
    """A gRPC channel with credentials.

    Calls run in the threads of a pool. An interrupt inside grpc can leave the lock of the channel held forever, and only the
    main thread gets interrupts.

    Args:
        address: "host:port" or "grpc://…"; "grpcs://…" for TLS.
        api_key: the key that is sent with every call; "": no key.
        timeout: seconds, for calls with a quick reply.
        ca: a PEM file with the certificates to trust; default: the variable INTERPOSE_CA, else grpc's certificates.
        certificate: PEM files with the client's certificate and its key; default: the variables INTERPOSE_CERTIFICATE and
            INTERPOSE_CERTIFICATE_KEY, else none.
        stub: makes the service's methods of a channel.

    Raises:
        InvalidArgument: the address is none, or a file cannot be read.
    """

    def __init__(
        self,
        address: str,
        api_key: str,
        timeout: float,
        *,
        ca: str | Path | None = None,
        certificate: tuple[str | Path, str | Path] | None = None,
        stub: Callable[[Any], Any] = service_pb2_grpc.InterposeStub,
    ) -> None:
        self.address, encrypted = parse_address(address)
        self.timeout = timeout
        self._metadata: Metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        if encrypted:
            self._channel = grpc.secure_channel(self.address, _credentials(ca, certificate), options=_OPTIONS)
        else:
            self._channel = grpc.insecure_channel(self.address, options=_OPTIONS)
        self._stub = stub(self._channel)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="interpose")
        self._closed = False

    def unary(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Call a method with one reply, and return the reply."""
        return self.begin(method, request, timeout).result()

    def begin(self, method: str, request: Any, timeout: float | None = None) -> Future[Any]:
        """Start a call with one reply, and return its future."""
        return _submit(self._pool, self._unary, method, request, timeout or self.timeout)

    def stream(self, method: str, request: Any, metadata: Metadata = ()) -> Stream:
        """Return a call with a stream of replies and no time limit.

        Args:
            metadata: sent beside the key.
        """
        given = self._metadata + metadata
        return Stream(lambda: getattr(self._stub, method)(request, metadata=given), self._pool, self.address)

    def close(self) -> None:
        """Close the channel, which cancels its running calls."""
        if not self._closed:
            self._closed = True
            self._pool.submit(self._channel.close).result()
            self._pool.shutdown(wait=False)

    def _unary(self, method: str, request: Any, timeout: float) -> Any:
        with _mapped(self.address):
            return getattr(self._stub, method)(request, metadata=self._metadata, timeout=timeout)


def _credentials(ca: str | Path | None, certificate: tuple[str | Path, str | Path] | None) -> grpc.ChannelCredentials:
    ca = ca or os.environ.get(CA_VARIABLE)
    chain, key = certificate or (os.environ.get(CERTIFICATE_VARIABLE), os.environ.get(CERTIFICATE_KEY_VARIABLE))
    if bool(chain) != bool(key):
        raise InvalidArgument("a client's certificate needs its key: certificate=(FILE, KEY_FILE)")
    roots, chain_data, key_data = (_bytes(path) if path else None for path in (ca, chain, key))
    return grpc.ssl_channel_credentials(roots, key_data, chain_data)


def _bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"the file {path} cannot be read: {error.strerror}") from None


def _submit(pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Future[Any]:
    try:
        return pool.submit(call, *args)
    except RuntimeError:  # `close` has shut down the pool
        raise Unavailable("this client has been closed; connect again") from None


@contextmanager
def _mapped(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, address=address) from None
    except ValueError as error:
        if "closed channel" in str(error).lower():  # another thread has closed the channel meanwhile
            raise Unavailable("this client has been closed; connect again") from None
        raise
