"""One upload of a blob, checked against its digest.

Chunks may come in any order, and repeatedly.
"""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np

from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2 as pb


class Upload:
    """Gathers the chunks of one blob.

    Args:
        digest: "sha256:" and the lower-case hex digest of the blob.
        size: bytes of the blob.

    Attributes:
        received: bytes held so far; chunks that were sent twice count once.
        stored: settles when the complete blob has been checked and stored.
    """

    def __init__(self, digest: str, size: int) -> None:
        self.digest = digest
        self.size = size
        self.received = 0
        self.stored: asyncio.Future[None] | None = None
        # Zeroed pages are not backed by memory until a chunk is written into them.
        self._data = np.zeros(size, dtype=np.uint8)
        self._spans: list[tuple[int, int]] = []

    @property
    def complete(self) -> bool:
        """Whether every byte is here; `finish` then checks the digest."""
        return self.received == self.size

    def write(self, offset: int, data: bytes) -> None:
        """Store one chunk.

        Raises:
            ServiceFailure: INVALID_ARGUMENT, the chunk lies outside the blob.
        """
        stop = offset + len(data)
        if stop > self.size:
            raise ServiceFailure(
                failure(
                    pb.ERROR_CODE_INVALID_ARGUMENT,
                    f"a chunk of {len(data)} bytes at {offset} does not fit into an upload of {self.size} bytes",
                )
            )
        if not data:
            return
        self._data[offset:stop] = np.frombuffer(data, dtype=np.uint8)
        self._add(offset, stop)

    def finish(self) -> np.ndarray:
        """Return the bytes, uint8 of shape [size].

        Raises:
            ServiceFailure: INVALID_ARGUMENT, the bytes do not have the announced digest.
        """
        found = f"sha256:{hashlib.sha256(self._data.data).hexdigest()}"
        if found != self.digest:
            raise ServiceFailure(
                failure(
                    pb.ERROR_CODE_INVALID_ARGUMENT,
                    f"the uploaded bytes have the digest {found}, not {self.digest}: upload them again",
                )
            )
        return self._data

    def _add(self, start: int, stop: int) -> None:
        apart = []
        for span in self._spans:
            if span[1] < start or span[0] > stop:
                apart.append(span)
            else:
                start, stop = min(start, span[0]), max(stop, span[1])
        self._spans = sorted([*apart, (start, stop)])
        self.received = sum(span[1] - span[0] for span in self._spans)
