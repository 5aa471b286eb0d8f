"""`with client.session()`: large values stay on the server between traces and are fetched when the block ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2
from tests.unit.interpose.conftest import finish, numbers


def saves(**values):
    def script(service, trace):
        yield service.saves(0, **values)

    return script


def test_values_stay_until_the_block_ends(service, client, model):
    with client.session() as s:
        assert service.opened[-1].kept and s.id == "s0"
        service.script = saves(hidden=numbers(2000), small=np.ones(3), pair=(numbers(900), 1))
        with model.trace("a"):
            hidden = small = pair = 0
        assert isinstance(hidden, interpose.RemoteValue) and isinstance(small, np.ndarray)
        assert not service.fetched_from
        service.script = finish
        with model.trace("b"):
            print(hidden[-3:], pair)
        kinds = [value.WhichOneof("kind") for value in service.traces[-1].scope.values]
        assert kinds.count("remote") == 2 and "tensor" not in kinds
        last = hidden[-3:]
        other = hidden
        hidden = "something else"
        assert not service.closed
    assert hidden == "something else" and isinstance(other, interpose.RemoteValue), "only what a trace assigned"
    assert np.array_equal(pair[0], numbers(900)) and pair[1] == 1
    assert service.closed[-1].session_id == "s0"
    assert model.session is client.own_session


def test_lists_that_traces_fill(service, client, model):
    def script(service, trace):
        [index] = [i for i, value in enumerate(trace.scope.values) if value.WhichOneof("kind") == "list"]
        before = len(trace.scope.values[index].list.items)
        yield service.saves(-1, {index: [numbers(500 + i) for i in range(before + 1)]})

    service.script = script
    rows = []
    with client.session():
        for _ in range(2):
            with model.trace("a"):
                rows.append(model.model.layers[0].output)
        assert [type(row) for row in rows] == [interpose.RemoteValue] * 2
    assert [len(row) for row in rows] == [500, 501] and all(isinstance(row, np.ndarray) for row in rows)


def test_it_is_for_this_thread_and_this_client(service, client, model):
    other = interpose.connect(service.address, progress=False)
    with client.session() as outer:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(model.session))
        thread.start()
        thread.join()
        assert seen == [client.own_session] and other.current_session is other.own_session
        with client.session() as inner:
            assert model.session is inner.session
        assert model.session is outer.session
        with pytest.raises(interpose.InvalidArgument, match="running already"):
            outer.__enter__()
    other.close()


def test_a_session_is_found_again(service, client, model):
    service.script = saves(hidden=numbers(2000))
    found = []
    with pytest.raises(KeyboardInterrupt):
        with client.session() as s:
            found.append(s.id)
            with model.trace("a", blocking=False) as tracer:
                hidden = 0
            raise KeyboardInterrupt
    assert not service.closed, "whoever interrupts comes back"
    with interpose.connect(service.address, progress=False) as other:
        with other.session(found[0]) as again:
            value = again.saved()["hidden"]
            assert isinstance(value, interpose.RemoteValue) and np.array_equal(value[5:7].fetch(), [5, 6])
            assert [job.id for job in again.traces()] == [tracer.job.id]
        with pytest.raises(interpose.NotFound):
            with other.session("nonsense"):
                raise AssertionError
        with pytest.raises(interpose.NotFound):
            other.session("nonsense").saved()


def test_an_error_in_the_block_leaves_the_values_in_the_notebook(service, client, model):
    service.script = saves(hidden=numbers(2000))
    with pytest.raises(ZeroDivisionError):
        with client.session():
            with model.trace("a"):
                hidden = 0
            1 / 0
    assert np.array_equal(hidden, numbers(2000)) and len(service.closed) == 1


def test_values_that_cannot_be_fetched_at_the_end(service, client, model):
    service.script = saves(hidden=numbers(2000))
    with pytest.raises(interpose.NotFound, match="not on the server any more"):
        with client.session():
            with model.trace("a"):
                hidden = 0
            service.refusals["Fetch"] = [ServiceFailure(failure(trace_pb2.ERROR_CODE_NOT_FOUND, "too old"))]
    assert isinstance(hidden, interpose.RemoteValue)


def test_a_kept_session_is_not_replaced_by_an_empty_one(service, client, model):
    with client.session():
        with model.trace("what it left may be there"):
            pass
        service.sessions.clear()
        with pytest.raises(interpose.NotFound):
            with model.trace("a"):
                pass
        assert len(service.opened) == 1


def test_fetching_inside_of_a_session_all_the_same(service, client, model):
    service.script = saves(hidden=numbers(2000))
    with client.session():
        with model.trace("a", fetch=True):
            hidden = 0
        assert np.array_equal(hidden, numbers(2000))
