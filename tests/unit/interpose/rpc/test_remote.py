"""A RemoteValue knows its shape, is indexed like a tensor, and moves only what is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.rpc.remote import Fetching
from interpose.v1 import trace_pb2
from interpose.v1.value_pb2 import DTYPE_FLOAT32, Index, IndexItem, IndexSlice, Positions, TensorView
from interpose.wire import views as indexing
from tests.unit.interpose.conftest import finish, numbers

WHOLE = torch.arange(5 * 4 * 30, dtype=torch.float32).reshape(5, 4, 30)


@pytest.fixture
def remote(service, model):
    service.script = lambda service, trace: iter([service.saves(0, hidden=WHOLE)])
    with model.trace("Hello", fetch=False):
        hidden = model.model.layers[1].output[0].save()
    assert service.traces[0].remote and not service.fetched_from
    service.script = finish
    return hidden


def test_what_it_knows_without_asking(service, remote):
    assert remote.shape == torch.Size([5, 4, 30]) and remote.dtype == torch.float32 and remote.nbytes == 2400
    assert remote.ndim == 3 and len(remote) == 5 and "float32 [5, 4, 30], 2400 bytes" in repr(remote)
    assert not service.fetched_from
    assert torch.equal(remote.fetch(), WHOLE) and service.sent_bytes == 2400


@pytest.mark.parametrize(
    "subscript",
    [
        np.s_[-1], np.s_[2, 3, 4], np.s_[...], np.s_[..., 0], np.s_[1:3], np.s_[::2, 1], np.s_[:, None, -1], np.s_[None],
        np.s_[4:1], np.s_[[0, 2]], np.s_[:, [3, -1]], np.s_[0, :, [1, 5]], np.s_[..., [0]], np.s_[[1, 1], ..., 2],
        np.s_[None, ..., [2, 0], 1:3], np.s_[[True, False, False, True, True]], np.s_[torch.tensor([1, 0])],
        np.s_[:, torch.tensor([True, False, True, False])], np.s_[np.array([3])], np.s_[range(2)], np.s_[[]],
        np.s_[np.int64(2)], np.s_[torch.tensor(1)],
    ],
    ids=str,
)  # fmt: skip
def test_it_is_indexed_as_a_tensor_and_only_that_moves(service, remote, subscript):
    parts = subscript if isinstance(subscript, tuple) else (subscript,)
    wanted = WHOLE[tuple(list(part) if isinstance(part, range) else part for part in parts)]
    part = remote[subscript]
    assert part.shape == wanted.shape and part.nbytes == wanted.nbytes
    assert torch.equal(part.fetch(), wanted)
    assert service.sent_bytes == wanted.nbytes


def test_one_index_after_the_other(service, remote):
    part = remote[1:][:, [0, 3]][..., -2:][2]
    assert torch.equal(part.fetch(), WHOLE[1:][:, [0, 3]][..., -2:][2])
    assert service.sent_bytes == part.nbytes == 16
    for _ in range(indexing.MAX_CHAIN - 4):
        part = part[...]
    with pytest.raises(IndexError, match="one after another"):
        part[...]


@pytest.mark.parametrize(
    ("subscript", "words"),
    [
        (5, "out of bounds"),
        (np.s_[0, 0, 0, 0], "too many indices"),
        (np.s_[::-1], "positive"),
        (np.s_[[0], [1]], "two lists"),
        (np.s_[[9]], "out of range"),
        (np.s_[[True]], "booleans"),
        (np.s_[..., ...], "ellipsis"),
        ("name", "integers, slices"),
        (True, "integers, slices"),
        (1.5, "integers, slices"),
        (np.s_[[0] * 6], "more than the whole"),
        (1 << 70, "out of range"),
        (torch.ones(5, 4, dtype=torch.bool), "one dimension"),
    ],
)
def test_what_is_no_index(service, remote, subscript, words):
    with pytest.raises(IndexError, match=words):
        remote[subscript]
    assert not service.fetched_from


def test_what_a_server_refuses_that_no_client_of_ours_sends():
    items = [IndexItem(positions=Positions(at=[0] * 100))]
    cases = [
        TensorView(dtype=DTYPE_FLOAT32, shape=[-1]),
        TensorView(dtype=99, shape=[1]),
        TensorView(dtype=DTYPE_FLOAT32, shape=[1 << 62, 1 << 62]),
        TensorView(dtype=DTYPE_FLOAT32, shape=[1] * 33),
        TensorView(dtype=DTYPE_FLOAT32, shape=[2], indices=[Index(items=items)]),
        TensorView(dtype=DTYPE_FLOAT32, shape=[2], indices=[Index(items=[IndexItem()])]),
        TensorView(dtype=DTYPE_FLOAT32, shape=[2], indices=[Index(items=[IndexItem(slice=IndexSlice(step=0))])]),
        TensorView(dtype=DTYPE_FLOAT32, shape=[2], indices=[Index(items=[IndexItem(new_axis=True)] * 40)]),
        TensorView(dtype=DTYPE_FLOAT32, shape=[2], indices=[Index(items=[IndexItem(new_axis=True)] * 65)]),
        TensorView(dtype=DTYPE_FLOAT32, shape=[2], indices=[Index()] * (indexing.MAX_CHAIN + 1)),
    ]
    for view in cases:
        with pytest.raises(IndexError):
            indexing.check(view)
        with pytest.raises(IndexError):
            indexing.apply(np.zeros(8, np.uint8), view)
    with pytest.raises(IndexError, match="are not a float32 array"):
        indexing.apply(np.zeros(7, np.uint8), TensorView(dtype=DTYPE_FLOAT32, shape=[2]))


def test_what_it_does_not_do_says_what_does(remote):
    with pytest.raises(AttributeError, match=r"x\.fetch\(\)"):
        remote.mean()
    with pytest.raises(TypeError, match="fetch"):
        bool(remote)
    with pytest.raises(TypeError, match="fetch"):
        list(remote)


def test_a_later_trace_refers_to_it(service, model, remote):
    last = remote[-1]
    both = [remote, last]
    with model.trace("Hello"):
        model.model.layers[1].output[:] = last + both[0][0]
    trace = service.traces[-1]
    reads = {binding.name: binding.value for binding in trace.invokes[0].program.reads}
    found = trace.scope.values[reads["last"].ref].remote
    assert found.view.indices[0].items[0].at == -1 and found.blob_id == "blob/0"
    values = [value.WhichOneof("kind") for value in trace.scope.values]
    assert sorted(values) == ["list", "remote", "remote"], "each once, and no tensor"
    assert not service.fetched_from


def test_a_trace_of_another_session_names_the_one_that_has_it(service, remote):
    with interpose.connect(service.address, progress=False) as other:
        model = other.model()
        with model.trace("Hello"):
            print(remote[-1])
        with other.session(remote.session_id):
            with model.trace("Hello"):
                print(remote[-1])
    found = [trace.scope.values[trace.invokes[0].program.reads[0].value.ref].remote for trace in service.traces[1:]]
    assert [one.session_id for one in found] == [remote.session_id, ""], "of its own session it is not said"
    assert not service.fetched_from


def test_what_is_gone_says_so(service, remote):
    service.refusals["Fetch"] = [ServiceFailure(failure(trace_pb2.ERROR_CODE_NOT_FOUND, "kept for 600 s"))]
    with pytest.raises(
        interpose.NotFound, match=r"\[5, 4, 30\] is not on the server any more: kept for 600 s; run the"
    ):
        remote.fetch()


def test_a_session_that_is_there_is_not_replaced_because_a_value_is_not(service, model, remote):
    service.refusals["Submit"] = [ServiceFailure(failure(trace_pb2.ERROR_CODE_NOT_FOUND, "no saved value"))]
    with pytest.raises(interpose.NotFound, match="no saved value"):
        with model.trace("Hello"):
            print(remote)
    assert len(service.opened) == 1 and len(service.traces) == 1


def test_types_of_other_libraries_and_sizes(service, model):

    values = {
        "half": torch.arange(600, dtype=torch.bfloat16).reshape(2, 300),
        "wide": torch.arange(600).to(torch.complex128),
        "array": numbers(700).astype("float16"),
        "flags": torch.arange(999) % 3 == 0,
    }
    service.script = lambda service, trace: iter([service.saves(0, **values)])
    with model.trace("Hello", fetch=False):
        half = wide = array = flags = 0
    assert torch.equal(half[1, ::7].fetch(), values["half"][1, ::7]) and half.dtype == torch.bfloat16
    assert torch.equal(wide[[5, 4]].fetch(), values["wide"][[5, 4]])
    assert isinstance(array[3:9].fetch(), np.ndarray) and array.dtype == np.float16 and array.shape == (700,)
    assert np.array_equal(array[3:9].fetch(), values["array"][3:9])
    assert torch.equal(flags.fetch(), values["flags"])


def test_fetching_what_is_inside_of_something(remote):
    inner = {"a": remote}
    inner["self"] = inner
    outer = [inner, (1, remote[0]), remote]
    assert Fetching().value(outer) is outer and outer[0] is inner and inner["self"] is inner
    assert torch.equal(inner["a"], WHOLE) and torch.equal(outer[1][1], WHOLE[0]) and outer[2] is inner["a"]
