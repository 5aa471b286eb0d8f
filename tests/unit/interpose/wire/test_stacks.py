"""Stacks: arrays of one layout as one block of bytes, and what a receiver takes of malformed stacks."""

from __future__ import annotations

import io
import itertools
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interpose.v1 import value_pb2 as v
from interpose.v1.value_pb2 import Blob, Items, Mapping, Objects, Stack, StackSlice, Value
from interpose.wire import stacks
from interpose.wire import views as indexing
from interpose.wire.arrays import ArrayError
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import Encoder, WireError

DTYPES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2"
).split()


def filled(shape, name, seed=0):
    """A tensor of a dtype with bytes that are different in each array."""
    size = math.prod(shape) * torch.empty(0, dtype=getattr(torch, name)).element_size()
    data = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 256, size, dtype=np.uint8)
    return torch.from_numpy(data).view(getattr(torch, name)).reshape(shape)


def raw(array):
    """The bytes of a tensor or an array."""
    if isinstance(array, torch.Tensor):
        return bytes(array.contiguous().reshape(-1).view(torch.uint8).numpy())
    return array.tobytes()


def stacked(members):
    """A stack with its bytes."""
    message = stacks.layout(members)
    message.data = bytes(stacks.packed(members))
    return message


def check_same(back, members):
    assert len(back) == len(members)
    for one, other in zip(back, members, strict=True):
        assert type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        assert raw(one) == raw(other)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shapes", [[()] * 3, [(1, 5)] * 3, [(3, 2, 4), (1, 2, 4), (2, 2, 4)], [(4,), (1,)]])
def test_every_dtype_and_layout(name, shapes):
    members = [filled(shape, name, seed) for seed, shape in enumerate(shapes)]
    message = stacked(members)
    check_same(stacks.apart(message, message.data, torch_wanted=True), members)
    for one, other in zip(stacks.apart(message, message.data, torch_wanted=False), members, strict=True):
        assert isinstance(one, np.ndarray) and one.shape == tuple(other.shape) and raw(one) == raw(other)


def test_without_torch_bfloat16_is_of_ml_dtypes():
    message = stacked([torch.ones(1, 3).bfloat16(), torch.zeros(2, 3).bfloat16()])
    first, second = stacks.apart(message, message.data, torch_wanted=False)
    assert first.dtype == second.dtype == ml_dtypes.bfloat16
    assert first.tolist() == [[1, 1, 1]] and second.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_arrays_of_any_strides():
    base = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    image = base.contiguous(memory_format=torch.channels_last)
    members = [
        image,
        image.clone(memory_format=torch.channels_last) + 1,
        base.transpose(0, 1)[:, :2].transpose(0, 1)[:2],
    ]
    check_same(stacks.apart(stacked(members), bytes(stacks.packed(members)), torch_wanted=True), members)
    flat = np.asfortranarray(np.arange(12).reshape(3, 4))
    arrays = [flat, flat[:2], flat[::-1]]
    check_same(stacks.apart(stacked(arrays), bytes(stacks.packed(arrays)), torch_wanted=True), arrays)


def test_arrays_of_a_stack_have_elements_of_their_own():
    members = [torch.full((1, 64), float(i)) for i in range(100)]
    message = stacked(members)
    back = stacks.apart(message, np.frombuffer(message.data, np.uint8).copy(), torch_wanted=True)
    back[3] += 1
    back[4].zero_()
    assert all(torch.equal(back[i], members[i]) for i in range(100) if i not in (3, 4))
    assert back[3].untyped_storage().nbytes() == 256
    file = io.BytesIO()
    torch.save(back[7], file)
    assert len(file.getvalue()) < 256 + 2000 and len(pickle.dumps(back[7])) < 1500
    arrays = stacks.apart(message, np.frombuffer(message.data, np.uint8).copy(), torch_wanted=False)
    arrays[3] += 1
    assert (arrays[2] == 2).all() and (arrays[4] == 4).all() and len(pickle.dumps(arrays[7])) < 600


def test_a_read_only_buffer_is_copied():
    members = [torch.ones(2), torch.zeros(2)]
    message = stacked(members)
    data = bytes(message.data)
    stacks.apart(message, data, torch_wanted=True)[0].zero_()
    assert data == bytes(message.data)


def test_groups():
    rows = [torch.zeros(n, 4) for n in (1, 2, 3)]
    others = [torch.zeros(1, 5), torch.zeros(1, 4).half(), torch.zeros(4), torch.tensor(1.0)]
    empty = [torch.zeros(0, 4), torch.zeros(0, 4)]
    arrays = [np.zeros((1, 4), np.float32), np.zeros((2, 4), np.float32)]
    found = list(stacks.groups([*rows[:2], *others, *empty, arrays[0], rows[2], arrays[1]]))
    assert [[id(one) for one in group] for group in found] == [[*map(id, rows)], [*map(id, arrays)]]


def test_values_that_are_in_no_stack():
    for one in (
        torch.nn.Parameter(torch.zeros(1, 4)),
        torch.zeros(1, 4).to_sparse(),
        torch.zeros(1, 4, device="meta"),
        torch.zeros(1, 4, dtype=torch.complex64).conj(),
        torch.zeros((2 << 20) + 1),
        torch.quantize_per_tensor(torch.zeros(1, 4), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        np.zeros((1, 4), ">f4"),
        np.ma.masked_array([1.0], [True]),
    ):
        assert list(stacks.groups([one, one])) == []


def test_a_large_group_is_several_stacks(monkeypatch):
    monkeypatch.setattr(stacks, "MAX_STACK_BYTES", 100)
    members = [torch.zeros(1, 10) for _ in range(7)]
    assert [len(group) for group in stacks.groups(members)] == [2, 2, 2]  # the last is alone


def hostile(**fields):
    """A stack of two float32 arrays [1, 2], but for some fields."""
    message = Stack(dtype=v.DTYPE_FLOAT32, library=v.ARRAY_LIBRARY_TORCH, count=2, shape=[1, 2], data=bytes(16))
    for name, value in fields.items():
        message.ClearField(name)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, Blob):
            message.blob.CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


def table(*values, blobs=None):
    return Decoder(Objects(values=values), get_blob=(blobs or {}).__getitem__)


def of(first=0, count=1, stack=0):
    return Value(stacked=StackSlice(stack=stack, first=first, count=count))


@pytest.mark.parametrize(
    "message",
    [
        hostile(dtype=99),
        hostile(count=0),
        hostile(count=3),
        hostile(count=(1 << 32) - 1),
        hostile(shape=[1, -2]),
        hostile(shape=[0, 2]),
        hostile(shape=[1 << 62, 1 << 62]),
        hostile(shape=[1] * 32 + [2]),
        hostile(count=(1 << 32) - 1, shape=[0], data=b""),
        hostile(rows=[1]),
        hostile(rows=[1, 1, 1]),
        hostile(rows=[0, 2], shape=[2]),
        hostile(rows=[(1 << 64) - 1, 3], shape=[2]),
        hostile(data=bytes(15)),
        hostile(data=b""),
        hostile(blob=Blob(id="b", size=15)),
        hostile(blob=Blob(id="b", size=1 << 60)),
        hostile(dtype=v.DTYPE_BOOL, shape=[8], data=bytes([2] * 16)),
    ],
)
def test_malformed_stacks(message):
    def get_blob(blob):
        raise AssertionError("bytes are fetched only for a stack that they fit")

    for value in (of(), Value(list=Items(items=[of(count=2)]))):
        with pytest.raises(WireError):
            Decoder(Objects(values=[Value(stack=message)]), get_blob=get_blob).decode(value)


def test_a_blob_of_another_size_than_announced():
    decoder = Decoder(
        Objects(values=[Value(stack=hostile(blob=Blob(id="b", size=16)))]), get_blob=lambda blob: bytes(12)
    )
    with pytest.raises(WireError, match="12 bytes are not a stack"):
        decoder.decode(of())


@pytest.mark.parametrize(
    "value",
    [
        of(first=2),
        of(first=1, count=2),
        of(count=0),
        of(first=(1 << 32) - 1, count=(1 << 32) - 1),
        of(stack=1),
        of(stack=7),
        Value(ref=0),
        Value(stack=hostile()),
    ],
)
def test_slices_that_are_no_part_of_a_stack(value):
    for outer in (value, Value(list=Items(items=[value])), Value(tuple=Items(items=[value]))):
        with pytest.raises(WireError):
            table(Value(stack=hostile()), Value(list=Items())).decode(outer)


def test_several_arrays_where_one_is_meant():
    two = of(count=2)
    for value in (
        two,
        Value(dict=Mapping(keys=[Value(text="a")], values=[two])),
        Value(slice=v.SliceValue(start=two)),
        Value(set=Items(items=[two])),
    ):
        with pytest.raises(WireError, match="2 arrays of a stack where one is meant"):
            table(Value(stack=hostile())).decode(value)


def test_slices_are_bounded_together(monkeypatch):
    monkeypatch.setattr("interpose.wire.decoder._MAX_SLICED", 10)
    with pytest.raises(WireError, match="more than 10 arrays"):
        table(Value(stack=hostile())).decode(Value(list=Items(items=[of(count=2)] * 6)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 60))
def test_any_bytes_give_arrays_or_an_error(noise, at):
    """A message with some bytes overwritten is rebuilt, or refused with a `WireError`."""
    good = Objects(values=[Value(stack=hostile()), Value(list=Items(items=[of(count=2), of(1)]))]).SerializeToString()
    try:
        objects = Objects.FromString(good[:at] + noise + good[at + len(noise) :])
    except Exception:  # not a message
        return
    for index in range(len(objects.values)):
        decoder = Decoder(objects, get_blob=lambda blob: bytes(min(blob.size, 1000)))
        try:
            decoder.complete(index)
        except WireError:
            continue


SHAPES = st.lists(st.tuples(st.integers(1, 4), st.just(3)), min_size=2, max_size=6) | st.lists(
    st.just((2,)), min_size=2, max_size=5
)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.booleans(), st.data())
def test_round_trips_through_a_table(shapes, name, as_blob, data):
    """Lists, tuples and dicts of stacked tensors come back, with every identity."""
    members = [filled(shape, name, seed) for seed, shape in enumerate(shapes)]
    picks = st.lists(st.sampled_from(range(len(members))), max_size=8)
    value = [
        [members[i] for i in data.draw(picks)],
        tuple(members[i] for i in data.draw(picks)),
        {"a": members[0], "b": [members[i] for i in data.draw(picks)], "c": 5},
        [1, *members, None, members[-1]],
    ]
    encoder = Encoder(inline_bytes=0, put_blob=lambda data: "unused")
    block = bytes(stacks.packed(members))
    payload = Blob(id="it", size=len(block)) if as_blob else block
    encoder.stack(members, stacks.layout(members), payload)
    sent = encoder.encode(value)
    back = Decoder(encoder.objects, get_blob=lambda blob: bytearray(block)).decode(sent)
    whole = back[3][1:-2]
    check_same(whole, members)
    assert back[3][0] == 1 and back[3][-2] is None and back[3][-1] is whole[-1]
    index = {id(member): i for i, member in enumerate(members)}
    for mine, theirs in ((value[0], back[0]), (value[1], back[1]), (value[2]["b"], back[2]["b"])):
        assert type(mine) is type(theirs)
        assert [id(whole[index[id(one)]]) for one in mine] == [id(one) for one in theirs]
    assert back[2]["a"] is whole[0] and back[2]["c"] == 5


def test_arrays_that_follow_each_other_are_one_value():
    members = [torch.zeros(1, 4) for _ in range(2000)]
    encoder = Encoder(inline_bytes=0, put_blob=lambda data: "b")
    encoder.stack(members, stacks.layout(members), bytes(stacks.packed(members)))
    sent = encoder.items([members[:1000], *members[1000:], members[5], members[6], members[4]])
    assert [value.stacked.count for value in sent[1:]] == [1000, 2, 1]
    assert len(encoder.objects.values[1].list.items) == 1


@pytest.mark.parametrize("shapes", [[()] * 3, [(2, 3)] * 3, [(1, 3), (4, 3), (2, 3)]])
def test_views_are_the_places_of_the_arrays(shapes):
    members = [filled(shape, "float32", seed) for seed, shape in enumerate(shapes)]
    message = stacked(members)
    data = np.frombuffer(message.data, np.uint8)
    for view, member in zip(stacks.views(message), members, strict=True):
        assert indexing.check(view) == tuple(member.shape)
        assert indexing.apply(data, view).tobytes() == raw(member)


@pytest.mark.parametrize("shapes", [[(2, 3)] * 3, [(1, 3), (4, 3), (2, 3)], [()] * 3])
def test_a_table_without_stacks(shapes):
    members = [filled(shape, "bfloat16", seed) for seed, shape in enumerate(shapes)]
    encoder = Encoder(inline_bytes=0, put_blob=lambda data: "b")
    encoder.stack(members, stacks.layout(members), bytes(stacks.packed(members)))
    sent = encoder.encode([(members[1],), {"x": members[0]}, *members, members[0]])
    before = encoder.objects.SerializeToString()
    plain = stacks.without(encoder.objects)
    assert encoder.objects.SerializeToString() == before
    assert not {"stack", "stacked"} & {value.WhichOneof("kind") for value in plain.values}
    back = Decoder(plain, get_blob=lambda blob: b"").decode(sent)
    check_same(back[2:5], members)
    assert back[0][0] is back[3] and back[1]["x"] is back[2] is back[5]
    assert stacks.without(plain) is plain


def test_a_table_without_stacks_names_the_parts_of_a_blob():
    members = [filled((rows, 3), "float32", rows) for rows in (1, 2, 3)]
    block = np.frombuffer(bytes(stacks.packed(members)), np.uint8)
    encoder = Encoder(inline_bytes=0, put_blob=lambda data: "b")
    encoder.stack(members, stacks.layout(members), Blob(id="blob/7", size=block.nbytes))
    encoder.encode(members)
    plain = stacks.without(encoder.objects)
    remotes = [value.remote for value in itertools.islice(plain.values, 2, None)]
    assert [value.ref for value in plain.values[1].list.items] == [2, 3, 4]
    for remote, member in zip(remotes, members, strict=True):
        assert remote.blob_id == "blob/7" and indexing.apply(block, remote.view).tobytes() == raw(member)


def test_a_malformed_stack_has_no_plain_form():
    with pytest.raises(ArrayError):
        stacks.without(Objects(values=[Value(stack=hostile(count=3))]))
