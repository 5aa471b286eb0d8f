"""`model.edit`: a block stays with the server under a name, and traces say which of them they run with."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2
from tests.unit.interpose.conftest import numbers


def test_the_block_is_left_with_the_server(service, model):
    vector = numbers(2000)
    with model.edit("calm") as edit:
        for _step in edit.iter[:]:
            model.model.layers[1].output[0][:] += vector
        raise ZeroDivisionError
    stored = service.edits["calm"]
    reads = {binding.name: binding.value for binding in stored.program.reads}
    assert "raise ZeroDivisionError" in stored.program.source and reads["edit"].tracer
    tensor = stored.scope.values[reads["vector"].ref].tensor
    assert tensor.data == vector.tobytes(), "an edit outlives the session that uploads belong to"
    assert not service.traces and not service.blobs and stored.program.filename == __file__


def test_traces_name_the_edits_that_they_want(service, model):
    with model.trace("Hello", edits=["calm", "loud"]):
        pass
    with model.trace("Hello", edits="calm"):
        pass
    with model.trace("Hello"):
        pass
    assert [list(trace.edits) for trace in service.traces] == [["calm", "loud"], ["calm"], []]


@pytest.mark.parametrize("edits", [3, [""], [3], None, ["a", "a"], {"a"}])
def test_what_is_no_list_of_names(service, model, edits):
    with pytest.raises(interpose.InvalidArgument, match="edit"):
        model.trace("Hello", edits=edits)


def test_listing_and_clearing(service, model):
    for name in ("calm", "loud", "other"):
        with model.edit(name) as edit:
            x = 1
    assert [edit.name for edit in model.edits()] == ["calm", "loud", "other"]
    listed = model.edits()[0]
    assert listed.source == "x = 1\n" and listed.nbytes > 0 and "'calm'" in repr(listed)
    assert listed.clear() and not listed.clear()
    assert edit.clear() and [edit.name for edit in model.edits()] == ["loud"]
    assert model.clear_edits() == 1 and not service.edits


def test_an_edit_does_not_save(service, model):
    with pytest.raises(interpose.InvalidArgument, match="an edit saves nothing") as caught:
        with model.edit("calm"):
            x = model.model.layers[1].output[0].save()
    assert caught.value.frames[0].text.strip() == "x = model.model.layers[1].output[0].save()"
    with pytest.raises(interpose.InvalidArgument, match="an edit saves nothing"):
        with model.edit("calm"):
            interpose.save(1)
    assert not service.edits


def test_what_is_refused_in_the_notebook(service, model):
    with pytest.raises(interpose.UnknownLocation, match="layers"):
        with model.edit("calm"):
            model.model.layers[99].output[:] = 0
    for name in ("", None, 3):
        with pytest.raises(interpose.InvalidArgument, match="has a name"):
            model.edit(name)
    with model.edit("calm") as edit:
        pass
    with pytest.raises(interpose.InvalidArgument, match="inside its block"):
        _ = edit.iter
    with pytest.raises(AttributeError):
        _ = edit.nothing
    assert list(service.edits) == ["calm"]


def test_a_value_on_the_server_is_no_part_of_an_edit(service, model):
    service.script = lambda service, trace: iter([service.saves(0, hidden=numbers(2000))])
    with model.trace("Hello", fetch=False):
        hidden = 1
    with pytest.raises(interpose.InvalidArgument, match=r"x\.fetch\(\)"):
        with model.edit("calm"):
            model.model.layers[0].output[:] = hidden


def test_on_an_event_loop(service):
    async def main():
        async with await interpose.connect_async(service.address, progress=False) as client:
            model = await client.model()
            assert isinstance(model, interpose.AsyncModel)
            for name in ("calm", "loud", "other"):
                async with model.edit(name) as edit:
                    x = np.ones(3)
            assert isinstance(service.edits["calm"], trace_pb2.Edit)
            assert [one.name for one in await model.edits()] == ["calm", "loud", "other"]
            listed = (await model.edits())[0]
            assert listed.source == "x = np.ones(3)\n" and listed.nbytes > 0 and "'calm'" in repr(listed)
            assert await listed.clear() and not await listed.clear()
            assert await edit.clear() and list(service.edits) == ["loud"]
            assert await model.clear_edits() == 1 and not await model.edits()
            for name in ("", None, 3):
                with pytest.raises(interpose.InvalidArgument, match="has a name"):
                    model.edit(name)
            service.refusals["ListEdits"] = [
                ServiceFailure(failure(trace_pb2.ERROR_CODE_PERMISSION_DENIED, "not yours"))
            ]
            with pytest.raises(interpose.PermissionDenied, match="not yours"):
                await model.edits()

    asyncio.run(main())
