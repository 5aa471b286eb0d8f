"""Sends a fetched value in pieces: the ingress sends little more than the client reads.

Between ingress and proxy, Serve does not slow a sender down for a slow receiver: all data of one call would pile up in the
proxy. The proxy does wait for the client with every message. So the proxy asks the ingress for one piece after another. It
asks for the next piece when the client has taken the piece before. The client sees one call.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError

from interpose.v1.service_pb2 import FetchChunk, FetchRequest

# Bytes of one call's piece. With more calls of a tenant at a time, pieces are smaller.
PIECE_BYTES = 4 << 20
SMALLEST_PIECE_BYTES = 512 << 10
# Bytes of all pieces of a tenant together.
TENANT_BYTES = 256 << 20
# Calls of a tenant, and of all tenants, at a time.
TENANT_CALLS = TENANT_BYTES // SMALLEST_PIECE_BYTES
MAX_CALLS = 1024
# Picking listed positions copies all selected data, for each piece. So these pieces are larger.
PICKED_PIECE_BYTES = 16 << 20

Stream = Callable[[bytes, Any], AsyncGenerator[bytes, None]]


class Pieces:
    """The Fetch calls of one proxy.

    Attributes:
        tenants: the number of calls of each tenant.
    """

    def __init__(self) -> None:
        self.tenants: Counter[str] = Counter()

    @property
    def calls(self) -> int:
        """The number of calls of all tenants."""
        return self.tenants.total()

    @contextlib.contextmanager
    def call(self, tenant: str) -> Iterator[None]:
        """Count a call of a tenant while it runs."""
        self.tenants[tenant] += 1
        try:
            yield
        finally:
            self.tenants[tenant] -= 1
            if not self.tenants[tenant]:
                del self.tenants[tenant]

    def handler(self, fetch: Stream, tenant: str) -> Stream:
        """Return a handler of a tenant's Fetch that calls `fetch` for each piece."""
        return functools.partial(self._chunks, fetch, tenant)

    async def _chunks(self, fetch: Stream, tenant: str, data: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            request = FetchRequest.FromString(data)
        except DecodeError:
            request = None  # the ingress answers the malformed message
        left = request.at_most if request is not None else 0
        while True:
            if request is not None:
                piece = self._piece(request, tenant)
                request.at_most = min(piece, left) if left else piece
                data = request.SerializeToString()
            sent = 0
            async with contextlib.aclosing(fetch(data, context)) as chunks:
                async for chunk in chunks:
                    sent += len(FetchChunk.FromString(chunk).data)
                    yield chunk
            # With fewer bytes than asked for, the value has ended or the call has failed.
            if request is None or sent < request.at_most or sent in (request.length, left):
                return
            request.offset += sent
            request.length -= sent if request.length else 0
            left -= sent if left else 0

    def _piece(self, request: FetchRequest, tenant: str) -> int:
        picked = any(item.HasField("positions") for index in request.view.indices for item in index.items)
        most = PICKED_PIECE_BYTES if picked else PIECE_BYTES
        return max(SMALLEST_PIECE_BYTES, min(most, TENANT_BYTES // self.tenants[tenant]))
