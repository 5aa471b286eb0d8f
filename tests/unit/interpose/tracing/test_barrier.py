"""Barriers in the notebook: who starts together, which names are exchanged, and what could never work."""

from __future__ import annotations

import pytest

import interpose
from interpose.v1.trace_pb2 import Invoke, Trace
from interpose.wire.gang import circular, start_after


def invokes(trace: Trace) -> list[tuple[bool, list[int]]]:
    return [(invoke.gang, list(invoke.after)) for invoke in trace.invokes]


def test_those_who_use_a_barrier_start_together_and_exchange_names(service, model):
    with model.trace(max_tokens=2) as tracer:
        barrier = tracer.barrier(2)
        unused = "outer"
        with tracer.invoke("a"):
            clean = model.model.layers[1].output
            own = 1
            barrier()
        with tracer.invoke("b"):
            barrier()
            model.model.layers[1].output = clean
            own = unused
            later = own
        with tracer.invoke("c"):
            print(later)
    (trace,) = service.traces
    assert invokes(trace) == [(True, []), (True, []), (False, [1])]
    assert list(trace.exchanged) == ["clean"]
    held = {binding.name: binding.value for binding in trace.invokes[0].program.reads}["barrier"].barrier
    assert (held.number, held.count) == (0, 2)


def test_a_barrier_inside_of_what_a_block_uses(service, model):
    with model.trace() as tracer:
        meet = {"here": [tracer.barrier(2)]}

        def wait():
            meet["here"][0]()

        with tracer.invoke("a"):
            wait()
        with tracer.invoke("b"):
            wait()
        with tracer.invoke("c"):
            pass
    (trace,) = service.traces
    assert [invoke.gang for invoke in trace.invokes] == [True, True, False]


def test_companions_wait_for_what_any_of_them_reads(service, model):
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke("a"):
            scale = 2
        with tracer.invoke("b"):
            barrier()
        with tracer.invoke("c"):
            barrier()
            print(scale)
    (trace,) = service.traces
    assert invokes(trace) == [(False, []), (True, []), (True, [0])]
    assert start_after(trace) == [set(), {0}, {0}]


def refused(error: pytest.ExceptionInfo, line: str) -> str:
    assert isinstance(error.value, interpose.InvalidArgument)
    assert error.value.frames[-1].text.strip() == line
    return str(error.value)


def test_too_few_use_it(service, model):
    with pytest.raises(interpose.InvalidArgument, match="waits for 3 invokes and 2 of the trace's use it") as error:
        with model.trace() as tracer:
            barrier = tracer.barrier(3)
            with tracer.invoke("a"):
                print(1)
                barrier()
            with tracer.invoke("b"):
                barrier()
    assert "tracer.barrier(2)" in refused(error, "barrier()")
    assert not service.traces


def test_a_round_trip_through_another_invoke(service, model):
    with pytest.raises(interpose.InvalidArgument, match="call the barrier in this block too") as error:
        with model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke("a"):
                one = 1
                barrier()
            with tracer.invoke("b"):
                two = one
            with tracer.invoke("c"):
                barrier()
                print(two)
    refused(error, "two = one")


def test_several_sequences_of_one_prompt(service, model):
    with pytest.raises(interpose.InvalidArgument, match="one sequence, not n") as error:
        with model.trace(n=2) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke("a"):
                barrier()
            with tracer.invoke("b"):
                barrier()
    refused(error, "barrier()")


def test_where_it_is_made_and_called(service, model):
    with pytest.raises(interpose.InvalidArgument, match="made in the outer block") as error:
        with model.trace() as tracer:
            with tracer.invoke("a"):
                barrier = tracer.barrier(2)
    refused(error, "barrier = tracer.barrier(2)")
    with pytest.raises(interpose.InvalidArgument, match="made in the outer block"):
        tracer.barrier(2)
    with pytest.raises(interpose.InvalidArgument, match=r"belongs in the outer block"):
        with model.trace("a") as tracer:
            with tracer.invoke("b"):
                pass
    for wrong in (0, 5, True, "2"):
        with pytest.raises(interpose.InvalidArgument, match="from 1 to 4"):
            with model.trace() as tracer:
                tracer.barrier(wrong)
    with pytest.raises(interpose.InvalidArgument, match="waits for the other invokes"):
        with model.trace() as tracer:
            barrier = tracer.barrier(2)
            barrier()
    with model.trace() as tracer:
        barrier = tracer.barrier(1)
        with tracer.invoke("a"):
            barrier()
    assert repr(barrier) == "<barrier of 1 invokes>"
    with pytest.raises(interpose.InvalidArgument, match="a barrier of another trace"):
        with model.trace() as tracer:
            with tracer.invoke("a"):
                barrier()
    with pytest.raises(interpose.InvalidArgument, match="a barrier of another trace"):
        with model.edit("calm"):
            barrier()


def test_what_is_circular():
    """Read off the message, as the service does."""

    def trace(*after: tuple[bool, list[int]]) -> Trace:
        return Trace(invokes=[Invoke(gang=gang, after=others) for gang, others in after])

    assert circular(trace((True, []), (True, []), (False, [0]))) is None
    assert circular(trace((False, []), (True, [0]), (True, []))) is None
    assert circular(trace((True, []), (True, [0]))) == 0
    assert circular(trace((True, []), (False, [0]), (False, [1]), (True, [2]))) == 2
