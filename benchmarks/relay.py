"""A connection to a service that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Takes connections on this machine and passes their bytes on to the service.

    Args:
        address: host:port of the service.

    Attributes:
        address: host:port for clients.
    """

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server)
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def cut(self) -> bool:
        """Break every open connection; return whether there was one. New connections are taken."""
        there, self._open = self._open, []
        for one in there:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        return bool(there)

    def close(self) -> None:
        """Take no more connections, and break all open ones."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise the accepting thread would take one more connection
        self._listener.close()
        self.cut()
