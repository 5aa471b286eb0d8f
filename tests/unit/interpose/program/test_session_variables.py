"""What the traces of a session share: the session's copy counts, and only what the notebook has changed itself travels."""

from __future__ import annotations

import numpy as np
import pytest

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2
from tests.unit.interpose.conftest import finish, numbers


def keeping(version, updates=None, **names):
    """Answer as a session does that keeps what a trace shares."""

    def script(service, trace):
        event = service.saves(-1, {trace.variables[0].entry: updates} if updates is not None else None, **names)
        for variable in trace.variables:
            event.saves.variables.add(id=variable.id, entry=variable.entry, version=version)
        yield from finish(service, trace)
        yield event

    return script


def entry(trace, number=0):
    variable = trace.variables[number]
    return variable, trace.scope.values[variable.entry]


def shared_rows(service, model):
    """Return a list that a first trace shared with its session, which keeps it as [1]."""
    service.script = keeping(1, [1])
    with model.trace() as tracer:
        rows = [].save()
        with tracer.invoke("a"):
            rows.append(1)
    return rows


def test_a_list_stays_shared_and_does_not_travel_again(service, client, model):
    with client.session():
        service.script = keeping(1, [numbers(2000)])
        with model.trace() as tracer:
            rows = [].save()
            with tracer.invoke("a"):
                rows.append(model.model.layers[0].output)
        variable, value = entry(service.traces[0])
        assert (variable.version, variable.canonical) == (0, False) and value.WhichOneof("kind") == "list"
        assert isinstance(rows[0], interpose.RemoteValue)

        service.script = keeping(2, [numbers(2000), 5])
        same = rows
        with model.trace("b"):
            rows.append(model.model.layers[0].output)
        trace = service.traces[1]
        again, value = entry(trace)
        assert again.id == variable.id and (again.version, again.canonical) == (1, True)
        assert value.WhichOneof("kind") == "none" and len(trace.scope.values) == 1, "nothing but its name"
        assert [binding.name for binding in trace.shared] == ["rows"]
        assert "rows" not in {binding.name for binding in trace.invokes[0].program.reads}
        assert rows is same and rows[1] == 5 and not service.fetched_from

        rows.append("mine")  # now the notebook has another one
        with model.trace("c"):
            rows.append(1)
        third, value = entry(service.traces[2])
        assert (third.version, third.canonical) == (2, False)
        assert [item.WhichOneof("kind") for item in value.list.items] == ["ref", "integer", "text"]
        assert service.traces[2].scope.values[value.list.items[0].ref].WhichOneof("kind") == "remote"
    assert np.array_equal(rows[0], numbers(2000)), "the end of the session fetches"
    with client.session():
        service.script = finish
        with model.trace("d"):
            rows.append(1)
    assert not service.traces[3].variables, "another session shares nothing yet"


def test_outside_of_a_session_nothing_is_kept(service, model):
    with model.trace() as tracer:
        rows = [].save()
        with tracer.invoke("a"):
            rows.append(1)
    assert service.traces[0].shared and not service.traces[0].variables


def test_a_tensor_that_a_trace_replaces(service, client, model):
    with client.session():
        service.script = keeping(1, total=numbers(3000))
        with model.trace() as tracer:
            total = interpose.save(np.zeros(3000, np.float32))
            with tracer.invoke("a"):
                total = total + model.model.layers[0].output
        assert isinstance(total, interpose.RemoteValue)
        service.script = keeping(2, total=numbers(3000) * 2)
        with model.trace("b"):
            total = total + model.model.layers[0].output
        variable, value = entry(service.traces[1])
        assert variable.canonical and value.WhichOneof("kind") == "none" and variable.version == 1
    assert np.array_equal(total, numbers(3000) * 2)


def test_what_something_else_in_the_trace_holds_too_is_one_object_there(service, client, model):
    with client.session():
        service.script = keeping(1, {"rows": [1]})
        with model.trace() as tracer:
            kept = {"rows": []}.save()
            with tracer.invoke("a"):
                kept["rows"].append(1)
        inner = kept["rows"]
        service.script = finish
        with model.trace("b"):
            inner.append(kept)
        trace = service.traces[1]
        variable, value = entry(trace)
        reads = {binding.name: binding.value for binding in trace.invokes[0].program.reads}
        assert not variable.canonical and variable.version == 1
        assert value.dict.values[0].ref == reads["inner"].ref


def test_a_function_that_uses_it_changes_the_same_one(service, client, model):
    with client.session():
        rows = shared_rows(service, model)

        def add(value):
            rows.append(value)

        with model.trace("b"):
            add(model.model.layers[0].output)
        trace = service.traces[1]
        variable, value = entry(trace)
        assert [binding.value.ref for binding in trace.shared] == [variable.entry] and variable.version == 1
        assert not variable.canonical and value.list.items[0].integer == 1


def test_an_answer_that_comes_late_changes_nothing(service, client, model):
    with client.session():
        rows = shared_rows(service, model)
        service.script = keeping(2, [1, 2])
        with model.trace("b", blocking=False) as job:
            rows.append(2)
        service.script = keeping(3, [1, 2, 3])
        with model.trace("c"):
            rows.append(3)
        assert [trace.variables[0].canonical for trace in service.traces] == [False, True, True]
        assert rows == [1, 2, 3]
        job.job.wait()
        assert rows == [1, 2, 3]


def test_a_trace_that_failed_leaves_it_as_it_was(service, client, model):
    with client.session():
        rows = shared_rows(service, model)

        def fails(service, trace):
            raise ServiceFailure(failure(trace_pb2.ERROR_CODE_INTERVENTION, "ValueError: boom"))
            yield

        service.script = fails
        with pytest.raises(interpose.InterventionError):
            with model.trace("b"):
                rows.append(2)
        service.script = keeping(2, [1, 3])
        with model.trace("c"):
            rows.append(3)
        assert service.traces[-1].variables[0].canonical and rows == [1, 3]


def test_one_name_for_two_objects(service, client, model):
    with client.session():
        rows = shared_rows(service, model)
        kept = rows
        with pytest.raises(interpose.InvalidArgument, match="another object in another prompt") as caught:
            with model.trace() as tracer:
                for rows in (kept, ["other"]):
                    with tracer.invoke("b"):
                        rows.append(2)
        assert caught.value.frames[0].text.strip() == "rows.append(2)"
