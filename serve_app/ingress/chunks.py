"""Splits the bytes of an array into chunks, without a contiguous copy of the whole array."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from serve_app.tenants.admission import refuse


def chunks(value: np.ndarray, offset: int, length: int, step: int, at_most: int = 0) -> Iterator[tuple[int, bytes]]:
    """Iterate over a part of an array's bytes, in the order of its elements.

    Args:
        value: an array of any shape and strides.
        offset: byte at which the part begins.
        length: bytes of the part, 0 for the rest of the array.
        step: bytes of one chunk.
        at_most: bytes to yield at most, 0 for the whole part.

    Yields:
        Each chunk with its offset.

    Raises:
        ServiceFailure: INVALID_ARGUMENT, the array has no such part.
    """
    stop = offset + length if length else value.nbytes
    if stop > value.nbytes or offset > stop:
        raise refuse(f"bytes {offset} to {stop} of a value that has {value.nbytes}")
    if at_most:
        stop = min(stop, offset + at_most)
    size = value.itemsize
    flat = value.reshape(-1) if value.flags.c_contiguous else value.flat
    for start in range(offset, stop, step):
        end = min(start + step, stop)
        first = start // size
        elements = np.ascontiguousarray(flat[first : -(-end // size)]).view(np.uint8)
        yield start, elements[start - first * size : end - first * size].tobytes()
