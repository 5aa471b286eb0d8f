"""Invokes without a prompt in the notebook."""

from __future__ import annotations

import pytest

import interpose
from interpose.v1.trace_pb2 import Invoke, Prompt, Trace
from interpose.wire.gang import joint_invokes, refusal


def test_all_invokes_start_together_and_exchange_names(service, model):
    with model.trace(max_tokens=2) as tracer:
        with tracer.invoke("a"):
            clean = model.model.layers[1].output
        with tracer.invoke() as whole:
            rows = model.model.layers[2].output.save()
            print(clean)
        with tracer.invoke("b"):
            own = 1
    (trace,) = service.traces
    assert [(one.gang, one.joint, list(one.after)) for one in trace.invokes] == [
        (True, False, []),
        (True, True, []),
        (True, False, []),
    ]
    assert list(trace.exchanged) == ["clean"] and joint_invokes(trace) == [1] and refusal(trace) == ""
    assert trace.invokes[1].prompt.WhichOneof("kind") is None and not trace.invokes[1].sampling
    with pytest.raises(interpose.InvalidArgument, match="each prompt has its result"):
        whole.result


def test_what_cannot_be(service, model):
    with pytest.raises(interpose.InvalidArgument, match="takes no sampling parameters"):
        with model.trace() as tracer:
            tracer.invoke(max_tokens=3)
    with pytest.raises(interpose.InvalidArgument, match="stream=True exclude each other"):
        with model.trace(stream=True) as tracer:
            tracer.invoke()
    with pytest.raises(interpose.InvalidArgument, match="the trace has no prompt"):
        with model.trace() as tracer:
            with tracer.invoke():
                pass
    with pytest.raises(interpose.InvalidArgument, match="exclude each other in one trace") as error:
        with model.trace() as tracer:
            barrier = tracer.barrier(1)
            with tracer.invoke("a"):
                barrier()
            with tracer.invoke():
                pass
    assert error.value.frames[-1].text.strip() == "barrier()"
    with pytest.raises(interpose.InvalidArgument, match="one sequence, not n"):
        with model.trace(n=2) as tracer:
            with tracer.invoke("a"):
                pass
            with tracer.invoke():
                pass
    assert not service.traces


def test_what_the_service_refuses():
    prompt = Invoke(prompt=Prompt(text="a"), gang=True)
    whole = Invoke(gang=True, joint=True)
    assert refusal(Trace(invokes=[prompt, whole])) == ""
    assert "cannot stream" in refusal(Trace(invokes=[prompt, whole], stream=True))
    assert "has to be one" in refusal(Trace(invokes=[whole]))
    assert "start together" in refusal(Trace(invokes=[Invoke(prompt=Prompt(text="a")), whole]))
    late = Invoke(prompt=Prompt(text="a"), gang=True)
    late.after.append(0)
    assert "start together" in refusal(Trace(invokes=[prompt, late, whole]))
    with_prompt = Invoke(prompt=Prompt(text="a"), gang=True, joint=True)
    assert "generates nothing" in refusal(Trace(invokes=[prompt, with_prompt]))
