"""The edits of each tenant: by name, bounded, and nobody else's."""

from __future__ import annotations

import pytest

from actors.edit_store import EditStore
from interpose.contract.errors import ServiceFailure
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Blob, RemoteTensor, Tensor, Value
from serve_app.settings import ANONYMOUS, ModelSettings
from serve_app.tenants import admission


def edit(name: str, size: int = 10) -> pb.Edit:
    return pb.Edit(name=name, program=pb.Program(source="x" * size))


def names(store: EditStore, tenant: str, model: str = "m") -> list[str]:
    return [stored.name for stored in store.list(tenant, model).edits]


def test_they_belong_to_a_tenant_and_a_model() -> None:
    store = EditStore(8, 1 << 20)
    store.put("red", "m", edit("calm"))
    store.put("blue", "m", edit("calm", 20))
    store.put("red", "other", edit("calm", 30))
    [data] = store.get("red", "m", ["calm"])
    assert len(pb.Edit.FromString(data).program.source) == 10
    assert names(store, "green") == [] and names(store, "red") == ["calm"]
    assert store.clear("red", "m", "calm") == 1 and store.clear("red", "m", "calm") == 0
    assert names(store, "blue") == ["calm"] and names(store, "red", "other") == ["calm"]


def test_a_name_that_is_not_there() -> None:
    store = EditStore(8, 1 << 20)
    with pytest.raises(ServiceFailure, match="there are none") as caught:
        store.get("red", "m", ["calm"])
    assert caught.value.failure.code == pb.ERROR_CODE_NOT_FOUND
    store.put("red", "m", edit("calm"))
    store.put("blue", "m", edit("clam"))
    with pytest.raises(ServiceFailure, match="there are calm") as caught:
        store.get("red", "m", ["calm", "clam"])
    assert list(caught.value.failure.suggestions) == ["calm"]


def test_they_are_bounded_in_number_and_size() -> None:
    store = EditStore(2, 200)
    store.put("red", "m", edit("a"))
    store.put("red", "other", edit("b"))
    with pytest.raises(ServiceFailure, match=r"red has 2 edits, the most .*\.clear\(\)") as caught:
        store.put("red", "m", edit("c"))
    assert caught.value.failure.code == pb.ERROR_CODE_QUOTA_EXCEEDED
    store.put("red", "m", edit("a", 100))
    with pytest.raises(ServiceFailure, match="may have 200 together"):
        store.put("red", "m", edit("a", 190))
    assert len(pb.Edit.FromString(store.get("red", "m", ["a"])[0]).program.source) == 100
    store.put("blue", "m", edit("a", 150))
    assert store.clear("red", "m", "") == 1
    store.put("red", "m", edit("c"))


def test_what_is_no_edit() -> None:
    model = ModelSettings(model="m")
    admission.check_edit(edit("calm-2.x_1"), model, ANONYMOUS)
    bad = [edit(""), edit("a b"), edit("a" * 101), edit("/a"), edit("a", 2 << 20)]
    bad.append(pb.Edit(name="a", program=pb.Program(writes=["1x"])))
    for value in (Value(remote=RemoteTensor(blob_id="x")), Value(tensor=Tensor(blob=Blob(id="x", size=3)))):
        bad.append(edit("a"))
        bad[-1].scope.values.append(value)
    for one in bad:
        with pytest.raises(ServiceFailure) as caught:
            admission.check_edit(one, model, ANONYMOUS)
        assert caught.value.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT
    pickled = edit("a")
    pickled.scope.values.add(pickled=b"x")
    with pytest.raises(ServiceFailure, match="pickled"):
        admission.check_edit(pickled, model, ANONYMOUS)
