"""The client's check of the limits on a trace's source: its bytes and its syntax nodes.

The server checks the same limits.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from interpose.v1.service_pb2 import Limits


class Sources:
    """The sources of one trace: its blocks, functions and classes.

    Args:
        limits: the limits of the server; a limit of 0 is unknown.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._texts: set[str] = set()
        self._bytes = 0

    def refusal(self, what: str, source: str, body: Iterable[ast.AST]) -> str:
        """Add a source; return the reason why the server would refuse it, or "".

        Args:
            what: the owner of the source, for the message.
            source: the source.
            body: the syntax trees of the source.
        """
        size, most = len(source.encode()), self._limits.max_program_bytes
        if most and size > most:
            return f"{what} has {size} bytes of source, the server takes {most}; keep large constants in variables outside of it"
        nodes, most = sum(1 for tree in body for _ in ast.walk(tree)), self._limits.max_program_nodes
        if most and nodes > most:
            return (
                f"{what} is a program of {nodes} syntax nodes, the server takes {most}; keep lists of constants in variables "
                "outside of it, or cut it into functions"
            )
        if source not in self._texts:
            self._texts.add(source)
            self._bytes += size
        total = self._limits.max_trace_program_bytes
        if total and self._bytes > total:
            return (
                f"with {what} the trace's blocks, functions and classes have {self._bytes} bytes of source, the server takes "
                f"{total}; trace fewer different blocks at a time, or keep large constants in variables outside of them"
            )
        return ""
