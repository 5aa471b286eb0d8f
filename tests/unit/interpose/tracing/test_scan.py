"""`model.scan` in the notebook: what is sent, and shapes as values, with torch and without."""

from __future__ import annotations

import numpy as np
import pytest

import interpose
from interpose.v1 import value_pb2
from interpose.v1.trace_pb2 import Event, Invoke, Prompt, Trace
from interpose.wire.arrays import ShapeOnly
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import WireError
from interpose.wire.gang import refusal
from tests.unit.interpose.conftest import finish

SHAPE = value_pb2.Tensor(
    dtype=value_pb2.DTYPE_BFLOAT16, shape=[3, 64], library=value_pb2.ARRAY_LIBRARY_TORCH, shape_only=True
)


def decoded(tensor: value_pb2.Tensor, library: str) -> object:
    return Decoder(value_pb2.Objects(), get_blob=lambda blob: b"", library=library).decode(
        value_pb2.Value(tensor=tensor)
    )


def test_it_travels_as_a_scan_and_shapes_come_back(service, model):
    torch = pytest.importorskip("torch")

    def script(service, trace):
        yield from finish(service, trace)
        event = Event()
        event.saves.names.add(name="hidden").value.tensor.CopyFrom(SHAPE)
        yield event

    service.script = script
    with model.scan("Hello", max_tokens=2):
        hidden = model.model.layers[1].output.save()
    (trace,) = service.traces
    assert trace.scan and trace.invokes[0].prompt.text == "Hello"
    assert hidden.is_meta and tuple(hidden.shape) == (3, 64) and hidden.dtype == torch.bfloat16


def test_without_torch():
    value = decoded(SHAPE, "numpy")
    assert isinstance(value, ShapeOnly) and value.shape == (3, 64) and value.ndim == 2
    assert value.nbytes == 3 * 64 * 2 and value.dtype.itemsize == 2 and isinstance(value.dtype, np.dtype)


@pytest.mark.parametrize("library", ["auto", "numpy"])
def test_shapes_that_cannot_be(library):
    for shape in ([-1], [1] * 40):
        with pytest.raises(WireError, match="no array has the shape"):
            decoded(value_pb2.Tensor(dtype=value_pb2.DTYPE_FLOAT32, shape=shape, shape_only=True), library)
    with pytest.raises(WireError, match="unknown element type"):
        decoded(value_pb2.Tensor(dtype=99, shape=[1], shape_only=True), library)


def test_what_is_refused(service, model):
    with pytest.raises(interpose.InvalidArgument, match="takes one prompt"):
        model.scan(None)
    with pytest.raises(interpose.InvalidArgument, match="did you mean max_tokens"):
        model.scan("x", max_token=2)
    one = Invoke(prompt=Prompt(text="a"))
    assert refusal(Trace(invokes=[one], scan=True)) == ""
    for wrong in (
        Trace(invokes=[one, one], scan=True),
        Trace(invokes=[one], scan=True, stream=True),
        Trace(invokes=[one], scan=True, edits=["calm"]),
        Trace(invokes=[Invoke(prompt=Prompt(text="a"), gang=True)], scan=True),
    ):
        assert "a scan has one prompt" in refusal(wrong)
