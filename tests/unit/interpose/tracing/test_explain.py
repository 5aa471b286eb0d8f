"""`model.explain` in the notebook: what is sent, what is refused, and how an explanation reads."""

from __future__ import annotations

import asyncio

import pytest

import interpose
from interpose.v1.trace_pb2 import Event, Invoke, Prompt, Trace
from interpose.wire.gang import refusal
from tests.unit.interpose.conftest import finish

FACTOR = 3


def script(service, trace):
    yield from finish(service, trace)
    event = Event()
    event.explanation.notes.append("plans: false in the model's settings: blocks run as they are")
    event.explanation.parts.add(
        line=7,
        text="for step in tracer.iter[:]:",
        tier="block",
        best="plan",
        reads=[f"model.layers.{i}.output" for i in range(6)],
        writes=["model.layers.0.output"],
        why="a <b> of the tables",
        at=9,
        at_text="if h.norm() > 3:",
        instead="torch.where(condition, a, b)",
    )
    yield event


def test_an_explanation_is_a_text_and_a_table(service, model):
    service.script = script
    with model.trace("Hello", explain=True) as tracer:
        model.model.layers[1].output.save()
    (trace,) = service.traces
    assert trace.explain and trace.scan and trace.invokes[0].prompt.text == "Hello"
    found = tracer.explanation
    assert str(found).splitlines() == [
        "plans: false in the model's settings: blocks run as they are",
        "line 7: for step in tracer.iter[:]:",
        "    tier: block (plan with other settings of the model)",
        "    reads: model.layers.0.output, model.layers.1.output, model.layers.2.output, model.layers.3.output and 2 more",
        "    writes: model.layers.0.output",
        "    line 9: if h.norm() > 3:",
        "    why: a <b> of the tables",
        "    instead: torch.where(condition, a, b)",
    ]
    assert repr(found) == str(found)
    shown = found._repr_html_()
    assert "a &lt;b&gt; of the tables" in shown and shown.count("<tr>") == 7


def test_a_functions_body_is_the_block(service, model):
    service.script = script
    offset = [1.5]

    def block(tracer):
        """The docstring is no part of the block."""
        for _ in tracer.iter[:]:
            kept = model.model.layers[1].output * FACTOR + offset[0]

    assert model.explain(block, "Hello", max_tokens=2).parts[0].line == 7
    (trace,) = service.traces
    program = trace.invokes[0].program
    assert program.source.startswith("for _ in tracer.iter[:]:\n") and program.filename == __file__
    assert program.first_line == block.__code__.co_firstlineno + 2
    reads = {binding.name: binding.value.WhichOneof("kind") for binding in program.reads}
    assert reads == {"tracer": "tracer", "model": "module", "FACTOR": "integer", "offset": "ref"}
    assert trace.invokes[0].prompt.text == "Hello"


def test_parameters_are_the_tracer_and_the_model(service, model):
    service.script = script

    def named(tracer, model):
        model.logits.output

    def alone(t):
        for _ in t.iter[:]:
            model.logits.output

    model.explain(named)
    model.explain(alone)
    kinds = [
        {binding.name: binding.value.WhichOneof("kind") for binding in trace.invokes[0].program.reads}
        for trace in service.traces
    ]
    assert kinds == [{"model": "module"}, {"t": "tracer", "model": "module"}]


def test_a_text_uses_the_callers_names(service, model):
    service.script = script
    factor = 2
    model.explain("for step in tracer.iter[:]:\n    model.logits.output[:] *= factor * FACTOR\n", [1, 2, 3])
    program = service.traces[0].invokes[0].program
    assert {binding.name for binding in program.reads} == {"tracer", "model", "factor", "FACTOR"}
    assert (program.filename, program.first_line) == ("<block>", 1) and factor == 2


def test_what_is_refused(service, model):
    def returns(tracer):
        return 3

    def other(tracer, layer):
        pass

    def some(*tracers):
        pass

    with pytest.raises(interpose.InvalidArgument, match="takes a function"):
        model.explain(3)
    with pytest.raises(interpose.InvalidArgument, match="takes a function"):
        model.explain(print)
    for block in (other, some):
        with pytest.raises(interpose.InvalidArgument, match="takes a function"):
            model.explain(block)
    with pytest.raises(interpose.InvalidArgument, match="return"):
        model.explain(returns)
    with pytest.raises(interpose.InvalidArgument, match="no source"):
        model.explain(lambda tracer: tracer)
    with pytest.raises(interpose.InvalidArgument, match="no Python"):
        model.explain("for step in\n")
    with pytest.raises(interpose.InvalidArgument, match="no statement"):
        model.explain("# nothing\n")
    with pytest.raises(interpose.InvalidArgument, match="did you mean max_tokens"):
        model.explain("model.logits.output", max_token=2)
    for option in ({"stream": True}, {"blocking": False}, {"edits": ["calm"]}):
        with pytest.raises(interpose.InvalidArgument, match="exclude each other"):
            model.trace("Hello", explain=True, **option)
    with pytest.raises(interpose.InvalidArgument, match="takes one prompt"):
        model.trace(explain=True)
    assert not service.traces
    one = Invoke(prompt=Prompt(text="a"))
    assert "is a scan" in refusal(Trace(invokes=[one], explain=True))
    assert refusal(Trace(invokes=[one], explain=True, scan=True)) == ""


def test_a_server_that_explains_nothing(service, model):
    with model.trace("Hello", explain=True) as tracer:
        model.logits.output
    with pytest.raises(interpose.EngineError, match="older"):
        tracer.explanation


def test_it_is_awaited_on_an_event_loop(service):
    service.script = script

    async def run():
        client = await interpose.connect_async(service.address, progress=False)
        async with client:
            model = await client.model()

            def block(tracer):
                model.logits.output

            found = await model.explain(block)
            async with model.trace("Hello", explain=True) as tracer:
                model.logits.output
            return found, tracer.explanation

    found, other = asyncio.run(run())
    assert found == other and found.parts[0].tier == "block"
