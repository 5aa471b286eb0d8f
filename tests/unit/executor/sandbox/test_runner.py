"""The same block in the worker and in a sandboxed process: equal bit for bit, with the same errors at the same lines."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

from tests.unit.executor.sandbox.parts import Worker, plain

BLOCKS = {
    "a value saved": "h = model.layers[1].output[0].save()",
    "a value written in place": """
        model.layers[0].output[0][:] *= 3
        h = model.layers[1].output[0].save()
    """,
    "a value assigned": """
        made = model.layers[0].linear.output
        model.layers[0].linear.output = made * 2 + 1
        h = model.layers[1].output[0].save()
    """,
    "an item assigned": """
        model.layers[0].output[0] = torch.ones(3, 8)
        h = model.layers[1].output.save()
    """,
    "an input changed": """
        model.layers[1].input[0] = 0.5
        h = model.layers[1].linear.input.save()
    """,
    "a part of a value saved and then written": """
        h = model.layers[0].output[0]
        before = h[1:].save()
        h[1:] = 7
        after = h.save()
    """,
    "a list of all steps": """
        kept = []
        for step in tracer.iter[:]:
            kept.append(model.layers[1].output[0].save())
        result = tracer.result.save()
    """,
    "a loop that changes every step": """
        for step in tracer.iter[:]:
            model.layers[0].output[0][:] += step + 1
    """,
    "functions, classes and objects": """
        class Kept:
            def __init__(self, value):
                self.value = value
        def twice(value):
            return value * 2
        kept = Kept(twice(model.layers[0].output[0]))
        doubled = kept.value.save()
        names = {"a": [1, 2.5, "x"], "b": (None, True)}
        interpose.save(names)
    """,
    "random numbers": """
        drawn = torch.randn(4).save()
        model.layers[0].output[0][:] += torch.randn(8)
    """,
    "prints": "print('one', 2)\ntracer.log('three')",
    "a captured tensor": "h = (model.layers[0].output[0] @ weights).save()",
    "a large value": "large = torch.arange(300_000).save()",
    "a stop": "h = model.layers[0].output[0].save()\ntracer.stop()",
    "a module skipped": "model.layers[1].skip((model.layers[1].input * 0, None))\nh = model.layers[1].output[0].save()",
    "a name that is not there": "x = model.layers[0].output[0]\ny = x.nothing",
    "a location that has passed": "a = model.layers[1].output\nb = model.layers[0].output",
    "an unknown module": "a = model.layers[0].linaer.output",
    "a shape that does not fit": "model.layers[0].linear.output = torch.zeros(2, 2)",
    "a shape changed in place": "model.layers[0].linear.output.resize_(1, 2)\nmodel.layers[1].output",
    "a step that does not come": "for step in tracer.iter[5]:\n    pass",
    "a loop that goes on too long": "h = model.layers[0].output[0].save()\nwhile True:\n    pass",
    "a mode left open": "torch.set_default_device('meta')\nh = model.layers[0].output[0]",
    "an assertion of a function": """
        def check(value):
            assert value.sum() < -1e9, 'far too large'
        check(model.layers[0].output[0])
    """,
}
CAPTURED: dict[str, Any] = {"weights": torch.linspace(-1, 1, 64).view(8, 8)}


def same(one: Any, other: Any) -> bool:
    """Return whether two saved values are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
        )
    return bool(one == other)


def imported(source: str) -> str:
    """Return a block that imports what it uses first."""
    return "import torch, interpose\n" + textwrap.dedent(source).strip("\n")


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_gives_in_a_sandbox_what_it_gives_in_the_worker(worker: Worker, name: str) -> None:
    source = imported(BLOCKS[name])
    here, there = (worker.run(source, trusted=trusted, **CAPTURED) for trusted in (True, False))
    assert same(here.saved, there.saved), (here.saved, there.saved)
    assert same(here.outputs, there.outputs) and same(here.beside, there.beside)
    assert same(there.beside, plain())
    assert (here.logs, here.ended) == (there.logs, there.ended)
    assert (here.failure is None) == (there.failure is None), (here.failure, there.failure)
    if here.failure is not None and there.failure is not None:
        for field in ("code", "message", "location", "exception_type", "exception_message"):
            assert getattr(here.failure, field) == getattr(there.failure, field)
        if "shape changed in place" not in name:
            assert list(here.failure.frames) == list(there.failure.frames)


def test_the_account_has_what_a_block_read_and_wrote(worker: Worker) -> None:
    source = "h = model.layers[0].output[0]\nh[:] = 1\nmodel.layers[1].output"
    here, there = (worker.run(source, trusted=trusted).accounting for trusted in (True, False))
    assert here is not None and there is not None
    assert [one.written for one in there.locations] == [1, 0]
    assert list(here.locations) == list(there.locations)


def test_increments_of_a_streamed_trace_are_those_of_the_worker(worker: Worker) -> None:
    source = imported(BLOCKS["a list of all steps"])
    here, there = (worker.run(source, steps=3, trusted=trusted, stream=True) for trusted in (True, False))
    assert len(there.increments) > 2
    assert [one.SerializeToString(deterministic=True) for one in here.increments] == [
        one.SerializeToString(deterministic=True) for one in there.increments
    ]


def test_a_module_that_is_not_loaded_is_refused_with_the_reason(worker: Worker) -> None:
    failure = worker.run("import wave").failure
    assert failure is not None and "is not loaded in the sandbox" in failure.message
    assert failure.frames[-1].line == 1
