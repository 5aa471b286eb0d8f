"""A process that parses and compiles the texts of traces.

Neither a worker nor the engine's replica waits for it. Parsing and compiling run in C under the interpreter's lock, and a few
lines can keep Python's compiler busy for minutes. In a process of its own the compiler stops nothing else, it can be ended, and
its memory is bounded. The process runs no code of the texts. It ends with the process that started it.
"""

from __future__ import annotations

import collections
import contextlib
import marshal
import multiprocessing.connection
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import astuple
from typing import Any

from executor.core.programs import Code, Unit, made

SECONDS = 10.0  # seconds, for all texts of a trace together
_MEMORY_BYTES = 2 << 30
_KEPT_BYTES = 32 << 20  # of finished code, for traces that come again


class Compiler:
    """Compiles the texts of traces, one trace at a time.

    Args:
        max_nodes: the largest number of nodes that the syntax tree of one text may have.
        seconds: the time that the texts of one trace may take together, in seconds.
    """

    def __init__(self, max_nodes: int, seconds: float = SECONDS) -> None:
        self._max_nodes = max_nodes
        self._seconds = seconds
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[str, Code] = collections.OrderedDict()
        self._kept_bytes = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None

    def compile(self, units: list[Unit]) -> dict[str, Code]:
        """Return each unit's code, or the reason why it has none, by the units' keys.

        The call waits, so it belongs in a thread.
        """
        keys = {unit.key: unit for unit in units}
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
            for key in found:
                self._kept.move_to_end(key)
            deadline = time.monotonic() + self._seconds
            for key, unit in keys.items():
                if key not in found:
                    found[key] = self._one(key, unit, deadline)
        return found

    def known(self, units: list[Unit]) -> dict[str, Code] | None:
        """Return each unit's code by the units' keys, if all were compiled before.

        The call does not wait.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if any(unit.key not in self._kept for unit in units):
                return None
            for unit in units:
                self._kept.move_to_end(unit.key)
            return {unit.key: self._kept[unit.key] for unit in units}
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process. A second call does nothing."""
        with self._lock:
            self._end()

    def _one(self, key: str, unit: Unit, deadline: float) -> Code:
        message = (
            f"the server's Python did not compile {unit.what} in {self._seconds:g} s; make it shorter, or nest it less "
            "deeply"
        )
        if time.monotonic() >= deadline:
            return message
        for again in (True, False):
            if self._process is None:
                self._start()
            try:
                self._connection.send_bytes(marshal.dumps((self._max_nodes, astuple(unit))))
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    self._end()
                    return message
                code: Code = marshal.loads(self._connection.recv_bytes())
            except (OSError, EOFError):
                # The process may have died between two traces, through no fault of this text.
                self._end()
                if not again:
                    return f"the server's Python cannot compile {unit.what}: its compiler ended"
            else:
                self._keep(key, code)
                return code
        raise AssertionError

    def _keep(self, key: str, code: Code) -> None:
        self._kept[key] = code
        self._kept_bytes += len(code)
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])

    def _start(self) -> None:
        mine, other = multiprocessing.connection.Pipe()
        with other:
            descriptor = other.fileno()
            # The process needs this package and the standard library, and nothing of this process's environment.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "executor.engine.compiler", str(descriptor)],
                pass_fds=[descriptor],
                env={"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
            )
        self._connection = mine

    def _end(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None


def serve(descriptor: int) -> None:
    """Compile the texts that arrive, until the other end is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (
        multiprocessing.connection.Connection(descriptor) as connection,
        contextlib.suppress(EOFError, OSError, KeyboardInterrupt),
    ):
        while True:
            max_nodes, parts = marshal.loads(connection.recv_bytes())
            connection.send_bytes(marshal.dumps(made(Unit(*parts), max_nodes)))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
