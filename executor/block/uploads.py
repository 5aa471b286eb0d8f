"""The large values of one trace, which its session keeps, and the worker for its tenant."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from executor.model.constants import ConstantPool
from interpose.v1.value_pb2 import Blob, Tensor

# An upload, whose bytes have this digest; the bytes of other blobs may be others later.
_UPLOAD = re.compile(r"sha256:[0-9a-f]{64}")


class Uploads:
    """What a trace's values refer to.

    Args:
        get: returns the bytes of a blob.
        tenant: the trace's tenant.
        pool: keeps tensors for the tenant's later traces; None: nothing is kept.
    """

    def __init__(self, get: Callable[[Blob], Any], tenant: str = "", pool: ConstantPool | None = None) -> None:
        self.get = get
        self._tenant = tenant
        self._pool = pool

    def tensor(self, message: Tensor, make: Callable[[], Any]) -> Any:  # [...], the shape of the message
        """Return a torch tensor that the trace may change.

        Args:
            message: the tensor; its bytes are in a blob.
            make: fetches the bytes and makes the tensor.
        """
        if self._pool is None or not _UPLOAD.fullmatch(message.blob.id):
            return make()
        return self._pool.tensor(self._tenant, (message.blob.id, message.dtype, tuple(message.shape)), make)
