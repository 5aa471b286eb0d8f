"""A way to a service that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Takes connections at `address`, on this machine, and passes on what comes.

    Args:
        address: host:port of the service.

    Attributes:
        address: where clients connect instead.
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
        """Break every connection that there is; new ones are taken. Returns whether there was one."""
        there, self._open = self._open, []
        for one in there:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        return bool(there)

    def close(self) -> None:
        """Take no connection any more, and break those that there are."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or the thread that accepts would take one more
        self._listener.close()
        self.cut()
