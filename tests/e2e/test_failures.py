"""What goes wrong in a block or a call is a typed error with the notebook's own lines, and the next trace is right."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import interpose
from interpose import (
    DeadlineExceeded,
    InterposeError,
    InterventionError,
    InvalidArgument,
    NotFound,
    OutOfOrder,
    QuotaExceeded,
    UnknownLocation,
)

PROMPT = "The Eiffel Tower is in"


def first_hidden(model: interpose.Model) -> torch.Tensor:
    """The first block's output of a plain trace."""
    with model.trace(PROMPT, max_tokens=2, temperature=0.0):
        hidden = model.model.layers[0].output[0].save()
        tokens = model.logits.output.save()
    return torch.cat([hidden.flatten(), tokens.flatten()])


@pytest.fixture(autouse=True)
def _next_trace_is_right(model: interpose.Model) -> Iterator[None]:
    """After every test, a trace gives the same values as before the test."""
    before = first_hidden(model)
    yield
    assert torch.equal(first_hidden(model), before)


def lines_of(error: InterposeError) -> list[str]:
    """The source lines an error points at; all of this file."""
    assert {frame.filename for frame in error.frames} <= {__file__}
    return [frame.text.strip() for frame in error.frames]


def test_an_exception_in_a_block(model: interpose.Model) -> None:
    with pytest.raises(InterventionError) as caught:
        with model.trace(PROMPT):
            hidden = model.model.layers[0].output[0]
            raise ValueError(f"boom {hidden.shape[-1]}")
    assert caught.value.message == "ValueError: boom 128"
    assert lines_of(caught.value) == ['raise ValueError(f"boom {hidden.shape[-1]}")']
    assert 'raise ValueError(f"boom' in caught.value.remote_traceback
    assert caught.value.trace_id
    assert caught.value.invoke == 0


def test_an_exception_deep_in_a_function(model: interpose.Model) -> None:
    def inner(value: torch.Tensor) -> torch.Tensor:
        return value @ torch.zeros(3)

    with pytest.raises(InterventionError) as caught:
        with model.trace(PROMPT):
            product = inner(model.model.layers[0].output[0]).save()
    assert caught.value.message.startswith("RuntimeError: ")
    assert lines_of(caught.value) == [
        "product = inner(model.model.layers[0].output[0]).save()",
        "return value @ torch.zeros(3)",
    ]


def test_one_invoke_fails_and_the_others_go_on(model: interpose.Model) -> None:
    good = []
    with pytest.raises(InterventionError, match="boom"):
        with model.trace(max_tokens=1) as tracer:
            with tracer.invoke("first"):
                raise ValueError("boom")
            with tracer.invoke(PROMPT):
                good = model.model.layers[1].output[0].save()
    assert good.shape[-1] == 128


def test_a_module_that_does_not_exist(model: interpose.Model) -> None:
    with pytest.raises(UnknownLocation) as caught:
        with model.trace(PROMPT):
            hidden = model.model.layerz[0].output.save()
    assert "layers" in caught.value.suggestions
    assert lines_of(caught.value) == ["hidden = model.model.layerz[0].output.save()"]


def test_a_location_out_of_order(model: interpose.Model) -> None:
    with pytest.raises(OutOfOrder) as caught:
        with model.trace(PROMPT):
            late = model.model.layers[2].output[0].save()
            early = model.model.layers[0].output[0].save()
    assert caught.value.location == "model.layers.0.output"
    assert lines_of(caught.value) == ["early = model.model.layers[0].output[0].save()"]


def test_a_step_that_is_never_reached(model: interpose.Model) -> None:
    with pytest.raises(UnknownLocation, match="never reached") as caught:
        with model.trace(PROMPT, max_tokens=2) as tracer:
            for _step in tracer.iter[5]:
                hidden = model.model.layers[0].output[0].save()
    assert lines_of(caught.value)


def test_a_bad_shape(model: interpose.Model) -> None:
    with pytest.raises(InvalidArgument, match=r"shape \[\d+, 128\]") as caught:
        with model.trace(PROMPT):
            model.model.layers[2].mlp.output = model.model.layers[2].mlp.output[:, :3]
    assert caught.value.location == "model.layers.2.mlp.output"


def test_an_unknown_sampling_parameter(model: interpose.Model) -> None:
    with pytest.raises(InvalidArgument) as caught:
        with model.trace(PROMPT, max_tokenz=3):
            hidden = model.model.layers[0].output[0].save()
    assert "max_tokens" in caught.value.suggestions


@pytest.mark.parametrize("prompt", ["word " * 3000, [5] * 3000], ids=["text", "ids"])
def test_a_prompt_that_is_too_long(model: interpose.Model, prompt: object) -> None:
    with pytest.raises(InvalidArgument, match=r"\d+ tokens"):
        with model.trace(prompt):
            hidden = model.model.layers[0].output[0].save()


def test_syntax_that_cannot_be_taken(model: interpose.Model) -> None:
    with pytest.raises(InvalidArgument) as caught:
        for _ in range(3):
            with model.trace(PROMPT):
                hidden = model.model.layers[0].output[0].save()
                break
    assert lines_of(caught.value) == ["break"]


def test_an_unknown_model(client: interpose.Client) -> None:
    with pytest.raises(NotFound) as caught:
        client.model("lama")
    assert "llama" in caught.value.suggestions


def test_a_block_that_never_ends(model: interpose.Model) -> None:
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        with model.trace(PROMPT):
            hidden = model.model.layers[0].output[0]
            while True:
                pass
    assert 2.5 < time.monotonic() - begun < 15
    assert lines_of(caught.value)


def test_a_block_that_never_ends_and_will_not_hear_of_it(model: interpose.Model) -> None:
    with pytest.raises(DeadlineExceeded):
        with model.trace(PROMPT):
            hidden = model.model.layers[0].output[0]
            while True:
                try:
                    while True:
                        pass
                except:  # noqa: E722
                    pass


def test_a_block_that_allocates_without_end(model: interpose.Model) -> None:
    # On a machine that is slow to give memory out, the time is up first.
    with pytest.raises((QuotaExceeded, DeadlineExceeded), match="MiB|longer than") as caught:
        with model.trace(PROMPT):
            hidden = model.model.layers[0].output[0]
            kept = []
            while True:
                kept.append(hidden.new_ones(8 << 20))
    assert lines_of(caught.value)


def test_others_do_not_notice(model: interpose.Model, client: interpose.Client) -> None:
    """A failing trace and a good one at the same time."""
    with pytest.raises(InterventionError):
        with model.trace(max_tokens=4, temperature=0.0) as tracer:
            with tracer.invoke(PROMPT):
                plain = model.logits.output.save()
            with tracer.invoke(PROMPT):
                model.model.layers[0].output[0][:] = float("nan")
                raise KeyError("gone")
    with model.trace(PROMPT, max_tokens=4, temperature=0.0):
        alone = model.logits.output.save()
    torch.testing.assert_close(plain, alone, atol=1e-4, rtol=1e-4)
