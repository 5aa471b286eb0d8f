"""Tensors on the way over the wire, where torch is installed."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from interpose.v1.value_pb2 import Objects, Value
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import WireError
from tests.unit.interpose.wire.test_wire import encode, round_trip, same

DTYPES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2"
).split()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_tensors(name, shape, inline_bytes):
    dtype = getattr(torch, name)
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    back = round_trip(tensor, inline_bytes)
    assert back.dtype == dtype and back.shape == tensor.shape
    if tensor.numel():
        assert bytes(back.reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))
    assert back.numel() == 0 or back.zero_() is back


def test_one_element_with_a_stride_of_its_own():
    column = torch.arange(12.0).reshape(1, 12)[:, 5]
    assert column.stride() == (12,)
    assert torch.equal(round_trip(column, 0), column)


def test_without_torch_tensors_are_arrays():
    back = round_trip([torch.ones(2, 3).bfloat16(), torch.float32, torch.Size([2])], library="numpy")
    assert same(back, [np.ones((2, 3), ml_dtypes.bfloat16), np.dtype("float32"), (2,)])


def test_views_parameters_and_gradients():
    base = torch.arange(12.0).reshape(3, 4)
    for tensor in (
        base.T,
        base[:, ::2],
        base[0].expand(5, 4),
        torch.nn.Parameter(base),
        base.to(torch.complex64).conj(),
    ):
        back = round_trip(tensor, 0)
        assert torch.equal(back, tensor.detach().resolve_conj()) and not back.requires_grad


def test_inference_tensors():
    with torch.inference_mode():
        tensor = torch.ones(3)
    assert torch.equal(round_trip(tensor), torch.ones(3))


def test_constants():
    constants = [torch.bfloat16, torch.device("cuda:1"), torch.Size([1, 2])]
    assert same(round_trip(constants), constants)


def test_one_tensor_twice_is_one_tensor():
    tensor = torch.ones(3)
    one, other = round_trip((tensor, tensor))
    assert one is other


def test_tensors_without_dense_data_are_refused():
    with pytest.raises(WireError, match="meta"):
        encode(torch.empty(2, device="meta"))
    with pytest.raises(WireError, match="to_dense"):
        encode(torch.eye(3).to_sparse())
    with pytest.raises(WireError, match="not nested ones"):
        encode(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_a_device_that_does_not_exist():
    with pytest.raises(WireError, match="nowhere"):
        Decoder(Objects(), get_blob=bytes).decode(Value(device="nowhere"))
