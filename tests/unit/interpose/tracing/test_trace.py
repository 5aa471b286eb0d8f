"""A block travels as source with what it reads, and what it saved appears in the caller's scope."""

from __future__ import annotations

import _thread
import contextlib
import functools
import linecache
import signal
import sys
import threading
import time
import types

import numpy as np
import pytest

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import trace_pb2
from interpose.v1.trace_pb2 import Event, Failure, Log
from tests.unit.interpose.conftest import finish, numbers

SCALE = 3.0


def double(x):
    return x * SCALE * helper(x)


def helper(x):
    return x + 2 if x else double(x)


def reads_of(program):
    return {binding.name: binding.value for binding in program.reads}


def as_array(value):
    return np.asarray(value)


def test_the_body_does_not_run_and_travels_as_source(service, model):
    with model.trace("Hello", max_tokens=3) as tracer:
        hidden = model.model.layers[1].output[0].save()  # a comment
        raise ZeroDivisionError
    (trace,) = service.traces
    (invoke,) = trace.invokes
    assert invoke.prompt.text == "Hello"
    assert "# a comment" in invoke.program.source and "raise ZeroDivisionError" in invoke.program.source
    assert {b.name: b.value.integer for b in trace.sampling} == {"max_tokens": 3}
    assert reads_of(invoke.program)["model"].module == "" and list(invoke.program.writes) == ["hidden"]
    assert tracer.result.text == " x" and tracer.result.token_ids == [7] and tracer.result.prompt_token_ids == [1, 2]
    assert tracer.usage.prompt_tokens == 2 and trace.id == tracer.id


def test_modules_are_applied_in_the_block(service, model):
    """What the server can apply travels, also where the outcome depends on names that the block binds."""
    with model.trace("Hello"):
        lens = model.lm_head(model.model.norm(model.model.layers[1].output[0])).save()
        layers = [1]
        layers(lens)
        try:
            model.model.layers[2](lens)
        except Exception:
            pass
    (trace,) = service.traces
    assert "model.lm_head(model.model.norm(" in trace.invokes[0].program.source


def test_saved_names_appear_in_the_callers_scope(service, model):
    def script(service, trace):
        yield service.saves(0, hidden=numbers(2000), many=[np.ones(3), {"a": numbers(3000)}], word="x")

    service.script = script
    with model.trace("Hello"):
        hidden = model.model.layers[1].output[0].save()
        many = [1].save()
        word = "a".save()
    assert np.array_equal(as_array(hidden), numbers(2000))
    assert np.array_equal(as_array(many[1]["a"]), numbers(3000)) and word == "x"
    hidden[:] = 0  # writable


def test_what_the_block_reads(service, model):
    table = {"a": [1, 2]}
    table["me"] = table
    vector = numbers(1000)
    layer = model.model.layers[2]
    scale = 1.5

    with model.trace([1, 2, 3]) as tracer:
        out = double(scale) + np.exp(1) + functools.reduce(max, table["a"])
        layer.output[:] = vector
        tracer.stop()
        undefined_here = never_bound  # noqa: F821
        interpose.save(out)
    (trace,) = service.traces
    reads = reads_of(trace.invokes[0].program)
    assert reads["tracer"].tracer and reads["layer"].module == "model.layers.2"
    assert reads["np"].python_module == "numpy" and reads["functools"].python_module == "functools"
    assert reads["interpose"].python_module == "interpose"
    assert reads["scale"].real == 1.5 and "never_bound" not in reads and "max" not in reads
    function = trace.scope.values[reads["double"].ref].function
    assert "x * SCALE" in function.source and function.filename == __file__
    assert {b.name for b in function.reads} == {"SCALE", "helper"}
    blob = trace.scope.values[reads["vector"].ref].tensor.blob
    assert service.blobs[blob.id] == vector.tobytes()
    assert list(trace.invokes[0].prompt.token_ids.ids) == [1, 2, 3]


def test_several_invokes(service, model):
    def script(service, trace):
        yield service.saves(1, last=1)
        yield service.saves(-1, {0: [5, 6]}, count=2)
        yield service.saves(0, first=0, last=0)
        yield from finish(service, trace)

    service.script = script
    outputs = []
    with model.trace(temperature=0.0) as tracer:
        found = [].save()
        count = interpose.save(0)
        for i, prompt in enumerate(["a", "b"]):
            with tracer.invoke(prompt, seed=i) as one:
                found.append(i)
                count += 1
                first = 1
                last = 2
            outputs.append(one)
        same = found
    (trace,) = service.traces
    assert [invoke.prompt.text for invoke in trace.invokes] == ["a", "b"]
    assert [reads_of(invoke.program)["i"].integer for invoke in trace.invokes] == [0, 1]
    assert [invoke.sampling[0].value.integer for invoke in trace.invokes] == [0, 1]
    assert {b.name for b in trace.shared} == {"found", "count", "same"}
    assert [list(invoke.after) for invoke in trace.invokes] == [[], []]
    assert found == [5, 6] and same is found
    assert (first, last, count) == (0, 1, 2)
    assert outputs[1].result.token_ids == [7]


def test_an_invoke_that_reads_what_an_earlier_one_assigns_runs_after_it(service, model):
    with model.trace() as tracer:
        with tracer.invoke("a"):
            clean = model.model.layers[0].output
        with tracer.invoke("b"):
            other = 1
        with tracer.invoke("c"):
            model.model.layers[0].output = clean
    assert [list(invoke.after) for invoke in service.traces[0].invokes] == [[], [], [0]]


def test_captured_containers_are_updated_in_place(service, model):
    def script(service, trace):
        by_kind = {value.WhichOneof("kind"): i for i, value in enumerate(trace.scope.values)}
        yield service.saves(-1, {by_kind["list"]: [1, 2], by_kind["dict"]: {"k": 1}, by_kind["set"]: {9}})

    service.script = script
    a, b, c = kept = [], {}, set()
    with model.trace("x"):
        a.append(1), b.update(k=1), c.add(9)
    assert kept == ([1, 2], {"k": 1}, {9}) and kept[0] is a


def test_module_level_and_closures(service, model):
    service.script = lambda service, trace: iter([service.saves(0, value=4)])
    names = {"model": model, "__name__": "somewhere"}
    text = "with model.trace('x'):\n    value = 1 .save()\n"
    linecache.cache["<cell 1>"] = (len(text), None, text.splitlines(True), "<cell 1>")
    exec(compile(text, "<cell 1>", "exec"), names)
    assert names["value"] == 4

    value = 0

    def inner():
        nonlocal value
        with model.trace("x"):
            value = 1

    inner()
    assert value == 4


def test_logs_are_printed_while_it_runs(service, model, capsys):
    service.script = lambda service, trace: iter([Event(log=Log(text="one\n")), Event(log=Log(text="two"))])
    with model.trace("x"):
        print("hello")
    assert capsys.readouterr().out == "one\ntwo"


def test_the_first_failure_is_raised_after_the_others_values(service, model):
    def script(service, trace):
        program = trace.invokes[0].program
        yield Event(
            failed=Failure(
                code=trace_pb2.ERROR_CODE_INTERVENTION,
                message="ValueError: boom",
                invoke=0,
                frames=[
                    trace_pb2.Frame(
                        filename=program.filename,
                        line=program.first_line,
                        end_line=program.first_line,
                        column=16,
                        end_column=21,
                        function="<module>",
                        text="x = 1 / 0",
                    )
                ],
            )
        )
        yield service.saves(1, good=1)

    service.script = script
    good = None
    with pytest.raises(interpose.InterventionError) as caught:
        with model.trace() as tracer:
            with tracer.invoke("a"):
                x = 1 / 0
            with tracer.invoke("b"):
                good = 2
    assert good == 1
    assert caught.value.invoke == 0
    assert "x = 1 / 0\n" in str(caught.value) and __file__ in caught.value.remote_traceback
    assert caught.value.remote_traceback.endswith("ValueError: boom")


class TestRefusedBeforeSending:
    """The notebook's own line, and what to write instead; nothing reaches the server."""

    @pytest.fixture(autouse=True)
    def nothing_sent(self, service):
        yield
        assert service.traces == []

    def test_unknown_module(self, model):
        with pytest.raises(interpose.UnknownLocation) as caught:
            with model.trace("x"):
                fine = model.model.norm.output
                h = model.model.layers[0].mpl.output.save()
        error = caught.value
        assert error.suggestions[0] == "mlp" and error.location == "model.layers.0.mpl"
        assert f'File "{__file__}"' in str(error) and "layers[0].mpl.output.save()" in str(error)
        assert str(error).splitlines()[-1].strip() == "^" * len("model.model.layers[0].mpl")

    @pytest.mark.parametrize("index", [3, -4])
    def test_index_past_the_end(self, model, index):
        layers = model.model.layers
        with pytest.raises(interpose.UnknownLocation, match="0 to 2"):
            layers[index]
        with pytest.raises(interpose.UnknownLocation, match="has 3 modules"):
            with model.trace("x"):
                h = layers[9].output.save()

    def test_a_module_in_a_function_of_the_users(self, model):
        def read():
            return model.model.layer[0].output

        with pytest.raises(interpose.UnknownLocation, match="layers"):
            with model.trace("x"):
                h = read().save()

    def test_a_module_that_cannot_be_applied(self, model):
        layer = model.model.layers[1]
        with pytest.raises(interpose.InvalidArgument, match="model.layers.1 holds attention") as caught:
            with model.trace("x"):
                h = layer.output[0]
                y = layer(h).save()
        assert caught.value.location == "model.layers.1"
        assert "y = layer(h).save()" in str(caught.value)
        assert str(caught.value).splitlines()[-1].strip() == "^" * len("layer(h)")

    @pytest.mark.parametrize("name", ["logits", "samples"])
    def test_a_location_that_cannot_be_skipped(self, model, name):
        place = getattr(model, name)
        with pytest.raises(interpose.InvalidArgument, match=f"assign {name}.output = value") as caught:
            with model.trace("x"):
                model.model.layers[1].mlp.skip(1)
                place.skip(2)
        assert "place.skip(2)" in str(caught.value)

    def test_tracer_words(self, model):
        with pytest.raises(interpose.UnknownLocation, match="did you mean result"):
            with model.trace("x") as tracer:
                h = tracer.results.save()

    def test_sampling(self, model):
        with pytest.raises(interpose.InvalidArgument, match="did you mean temperature"):
            model.trace("x", temprature=0.0)
        with pytest.raises(interpose.InvalidArgument, match="max_tokens"):
            model.trace("x", max_new_tokens=3)

    def test_values_that_cannot_travel(self, model):
        items = {"lock": [threading.Lock()]}
        with pytest.raises(interpose.InvalidArgument, match=r"'items'\['lock'\]\[0\]") as caught:
            with model.trace("x"):
                h = items["lock"]
        assert 'h = items["lock"]' in str(caught.value)

    def test_what_has_no_source_or_no_parts(self, model):
        made = type("Made", (), {"go": lambda self: 1})
        values = {
            "made": made,
            "instance": made(),
            "generator": (i for i in ()),
            "lock": threading.Lock(),
            "module": sys.modules[__name__],
            "held": types.SimpleNamespace(lock=threading.Lock()),
        }
        for name in values:
            source = f"with model.trace('x'):\n    h = {name}\n"
            filename = f"<cell {name}>"
            linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
            with pytest.raises(interpose.InvalidArgument, match=f"'{name}'.* cannot be sent") as caught:
                exec(compile(source, filename, "exec"), {**values, "model": model})
            assert f"h = {name}" in str(caught.value)

    def test_syntax_that_a_block_cannot_hold(self, model):
        def traced():
            with model.trace("x"):
                return 1

        with pytest.raises(interpose.InvalidArgument, match="return") as caught:
            traced()
        assert "return 1" in str(caught.value)

    def test_no_prompt(self, model):
        with pytest.raises(interpose.InvalidArgument, match="no prompt"):
            with model.trace():
                x = 1

    def test_too_many_invokes_and_too_much_source(self, model):
        with pytest.raises(interpose.InvalidArgument, match="4 invokes"):
            with model.trace() as tracer:
                for _ in range(5):
                    with tracer.invoke("x"):
                        pass
        source = "with model.trace('x'):\n    h = '" + "x" * 3000 + "'\n"
        linecache.cache["<big>"] = (len(source), None, source.splitlines(True), "<big>")
        with pytest.raises(interpose.InvalidArgument, match="2000"):
            exec(compile(source, "<big>", "exec"), {"model": model})

    def test_the_outer_blocks_own_exception(self, model):
        with pytest.raises(KeyError):
            with model.trace() as tracer:
                with tracer.invoke("a"):
                    pass
                {}["missing"]

    def test_a_session_is_the_clients(self, model):
        with pytest.raises(interpose.InvalidArgument, match=r"with client\.session\(\) as s"):
            with model.session():
                pass

    def test_values_outside_a_block(self, model):
        for use in (lambda: model.model.norm.output, lambda: model.lm_head(1), lambda: model.model.norm.next()):
            with pytest.raises(interpose.InvalidArgument, match="inside .with model"):
                use()
        with pytest.raises(interpose.InvalidArgument):
            model.model.norm.output = 1
        with pytest.raises(interpose.InvalidArgument, match="inside"):
            interpose.save(1)


def test_generate(service, model):
    with model.generate("x", max_new_tokens=5):
        pass
    assert service.traces[0].sampling[0].name == "max_tokens"


def test_an_empty_block(service, model):
    with model.trace("x"):
        pass
    assert len(service.traces) == 1


def test_lambdas_and_defaults(service, model):
    bias = [1]
    add = lambda x, b=bias: x + b[0]  # noqa: E731
    with model.trace("x"):
        h = add(1).save()
    (trace,) = service.traces
    function = trace.scope.values[reads_of(trace.invokes[0].program)["add"].ref].function
    assert function.source.startswith("lambda") and len(function.reads) == 1


def test_an_interrupt_cancels_the_trace(service, model):
    running = threading.Event()
    gone = threading.Event()

    def script(service, trace):
        running.set()
        for _ in range(200):
            time.sleep(0.05)
            yield Event(log=Log(text=""))
        gone.set()

    service.script = script

    def interrupt():
        running.wait()
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    # A shell's background processes ignore interrupts, and so would this test as one of them.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            with model.trace("x") as tracer:
                pass
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert service.cancelled == [tracer.id] and not gone.is_set()


def test_a_session_that_is_gone_is_opened_again(service, model):
    with model.trace("x"):
        pass
    service.sessions.clear()
    vector = numbers(1000)
    with model.trace("x"):
        h = vector.sum()
    assert len(service.traces) == 2 and len(service.sessions) == 1


def test_a_server_that_is_away_for_a_moment_is_tried_again(service, model):
    away = ServiceFailure(failure(trace_pb2.ERROR_CODE_UNAVAILABLE, "starting"))
    service.refusals["Submit"] = [away, away]
    with model.trace("x"):
        pass
    assert len(service.traces) == 1


def test_a_trace_that_was_accepted_is_not_sent_twice(service, model):
    def script(service, trace):
        raise ServiceFailure(failure(trace_pb2.ERROR_CODE_UNAVAILABLE, "engine gone", retry_after=5.0))
        yield

    service.script = script
    with pytest.raises(interpose.Unavailable, match="engine gone") as caught:
        with model.trace("x") as tracer:
            pass
    assert len(service.traces) == 1 and caught.value.retry_after == 5.0 and caught.value.trace_id == tracer.id


def test_errors_in_functions_called_from_threads_and_loops(service, model):
    service.script = lambda service, trace: iter([service.saves(0, value=trace.invokes[0].prompt.text)])
    found = {}

    def work(name):
        for i in range(3):
            with model.trace(f"{name}{i}"):
                value = (1).save()
            found[f"{name}{i}"] = value

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9 and all(key == value for key, value in found.items())


GONE = ServiceFailure(failure(trace_pb2.ERROR_CODE_NOT_FOUND, "the session has ended"))


@pytest.mark.parametrize("kept", [False, True])
def test_a_session_that_gives_way_to_others_is_opened_anew(service, client, model, kept):
    """More than once, if many want one; of a kept session, as long as nothing can have been in it."""
    with client.session() if kept else contextlib.nullcontext():
        service.refusals |= {"Submit": [GONE] * 3, "DescribeSession": [GONE] * 3}
        with model.trace("x"):
            pass
        assert len(service.traces) == 1 and len(service.opened) == 4
        service.refusals |= {"Submit": [GONE], "DescribeSession": [GONE]}
        with pytest.raises(interpose.NotFound) if kept else contextlib.nullcontext():
            with model.trace("x"):
                pass
        assert len(service.opened) == (4 if kept else 5)
