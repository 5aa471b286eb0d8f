"""A name that a block assigns and does not save gives one warning, where the notebook then looks for it in vain."""

from __future__ import annotations

import warnings

import pytest
from IPython.core.interactiveshell import InteractiveShell

import interpose
from tests.unit.interpose.conftest import numbers


def test_a_name_that_is_read_after_the_block(model):
    with pytest.warns(
        interpose.UnsavedWarning, match=r"assigned 'hidden' and did not save it.*hidden = ….save\(\)"
    ) as caught:
        with model.trace("Hello"):
            hidden = model.model.layers[1].output[0]
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.raises(UnboundLocalError):
        print(hidden)


def test_several_names_and_prompts_give_one_warning(model):
    with pytest.warns(interpose.UnsavedWarning, match="'a', 'b' and did not save them") as caught:  # noqa: PT031
        with model.trace() as tracer:
            with tracer.invoke("Hello"):
                a = model.model.layers[1].output[0]
                b = model.model.layers[2].mlp.output
            with tracer.invoke("there"):
                c = model.lm_head.input
    assert len(caught) == 1
    with pytest.raises(UnboundLocalError):
        print(a, b, c)


def saved(service, **names):
    service.script = lambda service, trace: iter([service.saves(0, **names)])


def check_nothing(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error", interpose.UnsavedWarning)
        run()


def test_names_that_have_a_use(service, model):
    saved(service, kept=numbers(3))
    before = 1

    def run():
        before = 1
        with model.trace("Hello") as tracer:
            kept = model.model.layers[0].output[0].save()
            before = model.model.layers[0].output[0]
            used = model.model.layers[1].output[0]
            print(used.shape)
            _scratch = model.model.layers[1].output[0]
            for step in tracer.iter[:]:
                last = step
            other = model.model.layers[1].output[0]
            other.save()
            maybe = model.model.layers[2].output[0].save()
            number = 5
            first, second = model.model.layers[2].output
            again = model.model.layers[2].mlp.output
        again = 2
        if not kept.size:
            print(used, _scratch, step, last, other, maybe, number, first, second)
        return before, again

    check_nothing(run)
    assert before == 1


def test_a_name_that_nothing_reads(model):
    def run():
        with model.trace("Hello"):
            dropped = model.model.layers[0].output[0]

    check_nothing(run)


def test_names_that_another_prompt_reads(model):
    def run():
        with model.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke("Hello"):
                row = model.model.layers[0].output[0]
                barrier()
            with tracer.invoke("there"):
                barrier()
                model.model.layers[0].output[0][-1] = row
        if not tracer:
            print(row)

    check_nothing(run)


def test_code_that_reads_names_by_text(model):
    def run():
        with model.trace("Hello"):
            hidden = model.model.layers[0].output[0]
            print(eval("hidden"))
        if not model:
            print(hidden)

    check_nothing(run)


def test_a_trace_that_fails_gives_no_warning(service, model):
    service.refusals["Submit"] = [
        interpose.contract.errors.ServiceFailure(
            interpose.contract.errors.failure(
                interpose.contract.errors.trace_pb2.ERROR_CODE_INTERVENTION, "ValueError: boom"
            )
        )
    ]

    def run():
        with pytest.raises(interpose.InterventionError), model.trace("Hello"):
            hidden = model.model.layers[0].output[0]
        if not model:
            print(hidden)

    check_nothing(run)


def test_a_cell_of_a_notebook(model):
    shell = InteractiveShell.instance()
    try:
        shell.user_ns["model"] = model
        with pytest.warns(interpose.UnsavedWarning, match="'hidden'"):
            shell.run_cell('with model.trace("Hello"):\n    hidden = model.model.layers[1].output[0]\n')
        cell = "with model.trace('Hello'):\n    other = model.model.layers[1].output[0]\n    print(other)\n"
        check_nothing(lambda: shell.run_cell(cell).raise_error())
    finally:
        InteractiveShell.clear_instance()
