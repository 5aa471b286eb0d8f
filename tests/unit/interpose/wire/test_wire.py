"""Values keep their type, their content and their identity on the way over the wire; malformed ones are refused."""

from __future__ import annotations

import copy
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from interpose.v1 import value_pb2
from interpose.v1.value_pb2 import Items, Value
from interpose.wire import views as indexing
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import MAX_DEPTH, Encoder, WireError
from interpose.wire.resolver import Resolver


class Blobs(dict):
    """A blob store: bytes by id."""

    def put(self, data: memoryview) -> str:
        key = f"blob-{len(self)}"
        self[key] = bytes(data)
        return key

    def get(self, blob):
        return self[blob.id]


def encode(obj, inline_bytes=64):
    blobs = Blobs()
    encoder = Encoder(inline_bytes=inline_bytes, put_blob=blobs.put)
    value = Value.FromString(encoder.encode(obj).SerializeToString())
    objects = value_pb2.Objects.FromString(encoder.objects.SerializeToString())
    return value, objects, blobs


def round_trip(obj, inline_bytes=64, **options):
    value, objects, blobs = encode(obj, inline_bytes)
    return Decoder(objects, get_blob=blobs.get, **options).decode(value)


def decode(value, *objects):
    return Decoder(value_pb2.Objects(values=objects), get_blob=Blobs().get).decode(value)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, slice):
        return same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    return a == b


keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
hashable = st.recursive(keys, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6)
numbers = st.floats() | st.integers() | st.integers(min_value=-(1 << 80), max_value=1 << 80)
dtypes = (
    hnp.scalar_dtypes()
    .filter(lambda d: d.kind in "biufc" and d.itemsize <= 16 and d.name not in ("float128", "longdouble", "complex256"))
    .map(lambda d: d.newbyteorder("="))
)
array = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
leaves = keys | numbers | st.complex_numbers(allow_nan=False) | array | st.just(...)
leaves |= st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([-2, 1, 3]))
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.builds(slice, inner, inner, inner)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(anything)
def test_what_goes_in_comes_out(obj):
    assert same(round_trip(obj), obj)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_wire_error_or_a_value(data):
    try:
        value = Value.FromString(data)
    except Exception:  # what protobuf refuses never reaches a decoder
        return
    try:
        decode(value, value)
    except WireError:
        pass


def tuples(depth, width):
    """A table in which each tuple holds the one before `width` times."""
    entries = [Value(tuple=Items(items=[Value(integer=1)]))]
    for i in range(depth):
        entries.append(Value(tuple=Items(items=[Value(ref=i)] * width)))
    return entries


RANK_ALONE = value_pb2.Mapping(keys=[Value(text="rank")], values=[Value(none=True)])
NAME_ALONE = value_pb2.Mapping(keys=[Value(text="text")])


@pytest.mark.parametrize("record", [("logprob", RANK_ALONE), ("result", NAME_ALONE)])
def test_a_record_that_lacks_something(record):
    kind, fields = record
    with pytest.raises(WireError):
        decode(Value(record=value_pb2.Record(type=kind, fields=fields)))


def test_a_key_that_would_be_hashed_without_end():
    """Hashing a tuple hashes what it holds, as often as it holds it."""
    table = tuples(60, 2)
    with pytest.raises(WireError, match="parts together"):
        decode(Value(set=Items(items=[Value(ref=60)])), *table)
    decode(Value(list=Items(items=[Value(ref=60)])), *table)
    assert len(decode(Value(set=Items(items=[Value(ref=4)])), *table)) == 1


def test_a_key_that_is_nested_too_deeply():
    """Each tuple of the list is made before the next, so no value is nested deeply but the last."""
    deep = Value(list=Items(items=[Value(ref=i) for i in range(50_001)]))
    keys = value_pb2.Mapping(keys=[Value(ref=50_000)], values=[Value(none=True)])
    with pytest.raises(WireError, match="too deeply"):
        decode(Value(list=Items(items=[deep, Value(dict=keys)])), *tuples(50_000, 1))


def test_a_view_of_nothing_with_an_endless_side():
    view = value_pb2.TensorView(dtype=value_pb2.DTYPE_FLOAT32, shape=[0, 1 << 62])
    with pytest.raises(IndexError):
        indexing.apply(np.zeros(0, np.uint8), view)


def test_identity_and_cycles():
    shared = [1]
    ring: list = [shared, shared, {"me": None}]
    ring.append(ring)
    ring[2]["me"] = ring
    knot = (ring, shared)
    ring.append(knot)
    back = round_trip(knot)
    assert back[0][0] is back[0][1] is back[1]
    assert back[0][3] is back[0] is back[0][2]["me"]
    assert back[0][4] is back


def test_tuples_shared_many_times_stay_small():
    pair: tuple = ([],)
    for _ in range(60):
        pair = (pair, pair)
    value, objects, _ = encode(pair)
    assert len(objects.values) < 70
    back = round_trip(pair)
    assert back[0] is back[1]


def test_index_of_is_by_identity():
    encoder = Encoder(inline_bytes=1, put_blob=Blobs().put)
    one, other = [], []
    encoder.encode(one)
    encoder.encode(other)
    assert (encoder.index_of(one), encoder.index_of(other), encoder.index_of([])) == (0, 1, None)


def test_temporaries_never_share_an_index():
    encoder = Encoder(inline_bytes=1, put_blob=Blobs().put)
    assert [encoder.encode([i]).ref for i in range(100)] == list(range(100))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_small_floats_in_numpy(name):
    array = np.arange(6).astype(getattr(ml_dtypes, name)).reshape(2, 3)
    assert same(round_trip(array), array)


def test_numpy_scalars_and_arrays_of_no_dimensions_stay_apart():
    scalar, array = round_trip([np.float32(1.5), np.array(1.5)])
    assert same(scalar, np.float32(1.5)) and same(array, np.array(1.5))


def test_numpy_arrays_in_other_layouts():
    array = np.arange(24).reshape(2, 3, 4)
    assert same(round_trip(array.T), array.T)
    assert np.array_equal(round_trip(array.astype(">i4")), array)
    assert np.array_equal(round_trip(array[:, ::2]), array[:, ::2])
    assert np.array_equal(round_trip(np.broadcast_to(array[0], (5, 3, 4))), np.broadcast_to(array[0], (5, 3, 4)))


def test_large_arrays_travel_as_blobs_and_small_ones_inline():
    value, objects, blobs = encode([np.zeros(8), np.zeros(9)], inline_bytes=64)
    assert [entry.tensor.WhichOneof("payload") for entry in objects.values[1:]] == ["data", "blob"]
    assert objects.values[2].tensor.blob.size == 72 and len(blobs) == 1


def test_decoded_arrays_are_writable_copies():
    array = np.zeros(100)
    value, objects, blobs = encode(array, 64)
    one = Decoder(objects, get_blob=blobs.get).decode(value)
    one[:] = 1
    assert not Decoder(objects, get_blob=blobs.get).decode(value).any()


def test_a_writable_buffer_is_taken_over():
    value, objects, blobs = encode(np.zeros(100), 64)
    buffer = bytearray(800)
    array = Decoder(objects, get_blob=lambda blob: buffer).decode(value)
    array[0] = 1.0
    assert any(buffer)


@pytest.mark.parametrize(
    "obj, message",
    [
        (object(), "object of type object"),
        (bytearray(b"x"), r"bytes\(x\)"),
        (type("Mine", (dict,), {})(), r"dict\(x\)"),
        (np.array(["a"]), "element type"),
        (np.zeros(1, [("a", "i4")]), "element type"),
        ("\ud800", "Unicode"),
        pytest.param(10**5000, "digits", id="huge"),
        (range(1 << 70), "64 bits"),
        ((i for i in ()), "generator"),
    ],
)
def test_what_cannot_travel_is_refused(obj, message):
    with pytest.raises(WireError, match=message) as caught:
        encode({"a": [1, obj]})
    assert caught.value.where == "['a'][1]"
    assert caught.value.subject is obj


def test_depth_is_bounded():
    deep: list = []
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    round_trip(deep)
    with pytest.raises(WireError, match="deeper"):
        encode([deep])
    values = [Value(list=Items(items=[Value(ref=i + 1)])) for i in range(5000)]
    with pytest.raises(WireError, match="deeper"):
        decode(Value(ref=0), *values)


def tensor(**fields):
    return Value(tensor=value_pb2.Tensor(**fields))


@pytest.mark.parametrize(
    "value",
    [
        Value(),
        Value(ref=7),
        tensor(dtype=9, shape=[2], data=b"1234567"),
        tensor(dtype=0, shape=[2], data=b"12"),
        tensor(dtype=99, shape=[2], data=b"12"),
        tensor(dtype=2, shape=[-1, -2], data=b"12"),
        tensor(dtype=2, shape=[1 << 62, 1 << 62, 0], data=b""),
        tensor(dtype=9, shape=[1 << 62], data=b"1234"),
        tensor(dtype=9, shape=[1 << 62], blob=value_pb2.Blob(id="x", size=4)),
        tensor(dtype=2, shape=[1] * 33, data=b"1"),
        tensor(dtype=1, shape=[2], data=b"\x01\x02"),
        Value(big_integer="12x"),
        Value(big_integer="1" * 5000),
        Value(range=value_pb2.RangeValue(start=1, stop=2, step=0)),
        Value(dtype=99),
        Value(slice=value_pb2.SliceValue()),
        Value(set=Items(items=[Value(list=Items())])),
        Value(dict=value_pb2.Mapping(keys=[Value(none=True)])),
        Value(size=Items(items=[Value(text="a")])),
        Value(module="model"),
        Value(tracer=True),
        Value(python_module="os"),
        Value(symbol=value_pb2.Symbol(module="os", name="system")),
        Value(pickled=b"cos\nsystem\n"),
        Value(function=value_pb2.Function(name="f")),
    ],
)
def test_malformed_values_are_refused(value):
    with pytest.raises(WireError):
        decode(value)


@pytest.mark.parametrize("entry", [Value(ref=0), Value(tuple=Items(items=[Value(ref=0)]))])
def test_entries_that_cannot_be_rebuilt_are_refused(entry):
    with pytest.raises(WireError):
        decode(Value(ref=0), entry)


class Functions(Resolver):
    """Rebuilds a function as a dict of its name and its namespace."""

    def function(self, function, decode):
        namespace: dict = {}
        decode.into(namespace, function.reads)
        return copy.copy(lambda: namespace)


def test_functions_that_reach_each_other():
    def function(name, reads):
        bindings = [value_pb2.Binding(name=key, value=Value(ref=index)) for key, index in reads.items()]
        return Value(function=value_pb2.Function(name=name, reads=bindings))

    objects = value_pb2.Objects(
        values=[
            function("f", {"g": 1, "also": 2}),
            function("g", {"f": 0}),
            Value(list=Items(items=[Value(ref=0), Value(ref=1)])),
        ]
    )
    decoder = Decoder(objects, get_blob=Blobs().get, resolver=Functions())
    f = decoder.object(0)
    g = f()["g"]
    assert g()["f"] is f and f()["also"] == [f, g]
