"""What a sandboxed process says before it answers: texts, saved bytes, what it asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from executor.core.errors import Refusal
from executor.sandbox.errors import told_of
from executor.sandbox.process import Lost
from executor.saves.collect import Limits
from interpose.v1 import trace_pb2 as pb

_MOST_UPLOADED = 4 << 30  # bytes of uploaded values that one trace gets
_MOST_LOG = 4 << 20  # characters of text that the worker takes from one trace
_PIECE = 64 << 20  # bytes of an uploaded value that travel at a time
_MOST_BLOBS = 100_000  # of one trace


class Notices:
    """Takes what the process of one trace says.

    Args:
        trace_id: the trace.
        invokes: how many invokes it has.
        limits: bounds on what is saved.
        get_blob: returns the bytes of an uploaded value, by its id.
        named: returns the ids of the uploaded values that the trace names.

    Attributes:
        emits: send printed text to the notebook, by the key of the block that printed.
    """

    def __init__(
        self,
        trace_id: str,
        invokes: int,
        limits: Limits,
        get_blob: Callable[[str], Any],
        named: Callable[[], frozenset[str]],
    ) -> None:
        self.emits: dict[str, Callable[[str], object]] = {}
        self._id = trace_id
        self._own = tuple(f"{trace_id}/{name}/" for name in (*range(invokes), "shared"))
        self._limits = limits
        self._get_blob = get_blob
        self._named = functools.cache(named)
        self._logged = 0
        self._saved = 0  # bytes of blobs
        self._uploaded = 0
        self._parts: dict[str, bytearray] = {}  # the blobs that are coming
        self._blobs: list[tuple[str, memoryview]] = []
        self._sending: tuple[str, memoryview] | None = None

    def log(self, told: Any) -> None:
        """Send printed text to the notebook.

        Raises:
            Lost: it is none, or more than a block prints.
        """
        form = isinstance(told, tuple) and [type(item) for item in told] == [str, str]
        if not form or told[0] not in self.emits or not told[1]:
            raise Lost("it printed no text")
        key, text = told
        self._logged += len(text)
        if self._logged > _MOST_LOG:
            raise Lost("it printed more than a block prints")
        self.emits[key](text)

    def piece(self, piece: Any) -> None:
        """Take a part of a blob.

        Raises:
            Lost: it is none, or more than the trace may save.
        """
        form = isinstance(piece, tuple) and len(piece) == 3
        if not form or not isinstance(piece[0], str) or type(piece[1]) is not int or not isinstance(piece[2], bytes):
            raise Lost("it sent a piece that is none")
        blob_id, size, data = piece
        if not blob_id.startswith(self._own) or len(blob_id) > len(self._id) + 32:
            raise Lost("it sent a blob under another trace's name")
        parts = self._parts.setdefault(blob_id, bytearray())
        self._saved += len(data)
        many = len(self._parts) + len(self._blobs) > _MOST_BLOBS
        too_much = len(parts) + len(data) > size or self._saved > self._limits.max_saved_bytes
        if too_much or many or (size and not data):
            raise Lost("it sent more bytes than it may save")
        parts += data
        if len(parts) == size:
            self._blobs.append((blob_id, memoryview(self._parts.pop(blob_id))))

    def take_blobs(self) -> list[tuple[str, memoryview]]:
        """Return the blobs that have come, and forget them."""
        blobs, self._blobs = self._blobs, []
        return blobs

    def upload(self, told: Any) -> dict[str, Any]:
        """Return a part of an uploaded value, or why the trace does not get it.

        Raises:
            Lost: no value was asked for.
        """
        form = isinstance(told, tuple) and [type(item) for item in told] == [str, int]
        if not form or told[1] < 0 or told[0] not in self._named():
            raise Lost("it asked for no value of its trace")
        blob_id, first = told
        try:
            if self._sending is None or self._sending[0] != blob_id:
                self._sending = blob_id, memoryview(self._get_blob(blob_id)).cast("B")
            data = self._sending[1]
            part = bytes(data[first : first + _PIECE])
            self._uploaded += len(part)
            if self._uploaded > _MOST_UPLOADED:
                message = f"the trace uses more than {_MOST_UPLOADED >> 30} GiB of uploaded values; use fewer"
                raise Refusal(pb.ERROR_CODE_QUOTA_EXCEEDED, message)
        except Refusal as error:
            return {"error": told_of(error), "size": 0, "data": b""}
        except KeyError:
            gone = Refusal(pb.ERROR_CODE_NOT_FOUND, "no such value was uploaded")
            return {"error": told_of(gone), "size": 0, "data": b""}
        if first + len(part) >= len(data):
            self._sending = None
        return {"error": None, "size": len(data), "data": part}

    def clear(self) -> None:
        """Forget what has come and was not taken."""
        self._parts.clear()
        self._blobs.clear()
        self._sending = None
