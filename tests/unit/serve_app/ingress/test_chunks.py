"""Chunks of an array's bytes: any window, any strides, element sizes that do not divide the chunk."""

from __future__ import annotations

import numpy as np
import pytest

from interpose.contract.errors import ServiceFailure
from serve_app.ingress.chunks import chunks

WHOLE = np.arange(7 * 5 * 11, dtype="u4").reshape(7, 5, 11)


@pytest.mark.parametrize(
    "value", [WHOLE, WHOLE[1:3], WHOLE[:, 2], WHOLE[::2, :, 3:], WHOLE[3, 2, 1], WHOLE[:0], WHOLE.T]
)
@pytest.mark.parametrize("step", [3, 7, 64, 10_000])
def test_any_window(value: np.ndarray, step: int) -> None:
    whole = value.tobytes()
    for offset, length in ((0, 0), (1, 0), (3, 9), (len(whole), 0), (0, len(whole))):
        if offset + length > len(whole):
            continue
        found = list(chunks(value, offset, length, step))
        assert b"".join(data for _, data in found) == whole[offset : offset + length if length else None]
        assert all(len(data) <= step for _, data in found)
        position = offset
        for start, data in found:
            assert start == position
            position += len(data)


def test_a_window_outside() -> None:
    for offset, length in ((0, 2000), (1541, 0), (1540, 1)):
        with pytest.raises(ServiceFailure, match="of a value that has 1540"):
            list(chunks(WHOLE, offset, length, 64))
