"""Tensors of earlier traces in a worker: bound from what a session holds, and saved again.

A block gets a copy of its own, which it may change. An unchanged copy leaves the trace as a reference to what the session
already holds. So its bytes do not travel, and are not stored twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from interpose.v1.value_pb2 import ARRAY_LIBRARY_NUMPY, Blob, RemoteTensor
from interpose.wire import arrays
from interpose.wire import views as indexing
from interpose.wire.encoder import WireError


class EarlierTensors:
    """The tensors of one trace that stayed on the server.

    Args:
        get_blob: returns the bytes of a saved value.
    """

    def __init__(self, get_blob: Callable[[Blob], Any]) -> None:
        self._get_blob = get_blob
        self._bytes: dict[str, np.ndarray] = {}  # by blob id; the memory is the session's own where it is on this node
        self._made: dict[int, tuple[Any, RemoteTensor]] = {}  # by the identity of the tensor, which is kept beside it

    def tensor(self, remote: RemoteTensor, placed: Callable[[Any], Any] = lambda tensor: tensor) -> Any:
        """Return a tensor, or an array where the saved value was an array.

        Args:
            placed: moves a tensor to the device on which the worker computes.

        Raises:
            WireError: the bytes do not fit the tensor's dtype and shape.
        """
        found = self._elements(remote)
        flat = np.ascontiguousarray(found).reshape(-1).view(np.uint8)
        wanted = remote.library != ARRAY_LIBRARY_NUMPY
        made = arrays.from_bytes(remote.view.dtype, found.shape, flat, torch_wanted=wanted)
        made = placed(made) if isinstance(made, torch.Tensor) else made
        self._made[id(made)] = (made, remote)
        return made

    def __bool__(self) -> bool:
        """Return whether `tensor` returned any tensor."""
        return bool(self._made)

    def made(self, value: Any) -> bool:
        """Return whether a value is a tensor or an array that `tensor` returned."""
        return id(value) in self._made

    def origin(self, value: Any) -> RemoteTensor | None:
        """Return the remote tensor of which a value is an unchanged copy, else None."""
        entry = self._made.get(id(value))
        if entry is None:
            return None
        remote = entry[1]
        before = self._elements(remote)
        if arrays.dtype_of(value.dtype) != remote.view.dtype or tuple(value.shape) != before.shape:
            return None
        data = arrays.tensor_bytes(value) if isinstance(value, torch.Tensor) else arrays.ndarray_bytes(value)
        flat = np.ascontiguousarray(before).reshape(-1).view(np.uint8)
        return remote if np.array_equal(np.frombuffer(data, np.uint8), flat) else None

    def _elements(self, remote: RemoteTensor) -> np.ndarray:  # [...], the shape of the view
        if remote.blob_id not in self._bytes:
            data = self._get_blob(Blob(id=remote.blob_id))
            raw = np.frombuffer(data, dtype=np.uint8)
            raw.flags.writeable = False  # Values are copied from these bytes, and other code could still write to them.
            self._bytes[remote.blob_id] = raw
        try:
            return indexing.apply(self._bytes[remote.blob_id], remote.view)
        except IndexError as error:
            raise WireError(f"a tensor of an earlier trace: {error}") from error
