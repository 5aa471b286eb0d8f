"""Uploads: any order, any repetition, and never the wrong bytes."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.upload import Upload
from interpose.contract.errors import ServiceFailure


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@given(st.binary(min_size=1, max_size=300), st.data())
def test_chunks_in_any_order_and_repeated(data: bytes, draw: st.DataObject) -> None:
    chunk = draw.draw(st.integers(1, 50))
    offsets = draw.draw(st.permutations(range(0, len(data), chunk)))
    again = draw.draw(st.lists(st.sampled_from(offsets), max_size=5))
    upload = Upload(digest(data), len(data))
    for offset in again:
        upload.write(offset, data[offset : offset + chunk])
    for offset in offsets:
        upload.write(offset, data[offset : offset + chunk])
    assert upload.complete
    assert upload.finish().tobytes() == data


def test_what_is_missing_is_counted() -> None:
    upload = Upload(digest(b"abcdef"), 6)
    upload.write(4, b"ef")
    upload.write(4, b"ef")
    assert upload.received == 2
    assert not upload.complete
    upload.write(0, b"abcde")
    assert upload.complete


def test_nothing_is_complete_at_once() -> None:
    assert Upload(digest(b""), 0).complete
    assert Upload(digest(b""), 0).finish().nbytes == 0


def test_other_bytes_than_announced_are_refused() -> None:
    upload = Upload(digest(b"abc"), 3)
    upload.write(0, b"abd")
    with pytest.raises(ServiceFailure, match="digest"):
        upload.finish()


def test_a_chunk_outside_is_refused() -> None:
    with pytest.raises(ServiceFailure, match="does not fit"):
        Upload(digest(b"abc"), 3).write(2, b"cd")
