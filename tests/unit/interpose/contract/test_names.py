"""A name of the model is no value: what uses it as one is refused, in the notebook where it can be, and told what to write."""

from __future__ import annotations

import numpy as np
import pytest

import interpose
from interpose.contract.names import written

REMEDY = r"write model\.logits\.output"


def refusal(caught: pytest.ExceptionInfo, line: str) -> None:
    assert [frame.text.strip() for frame in caught.value.frames] == [line]


def test_a_name_that_is_saved_in_a_block_is_refused_at_its_line(service, model):
    with pytest.raises(interpose.InvalidArgument, match=REMEDY) as caught, model.trace("Hello"):
        logits = model.logits.save()
    refusal(caught, "logits = model.logits.save()")
    with pytest.raises(interpose.InvalidArgument, match=REMEDY) as caught, model.trace("Hello"):
        logits = interpose.save(model.logits)
    refusal(caught, "logits = interpose.save(model.logits)")
    with pytest.raises(interpose.InvalidArgument, match=r"write model\.model\.layers\[1\]\.mlp\.output\.save\(\)"):
        with model.trace("Hello"):
            mlp = model.model.layers[1].mlp.save()
    with pytest.raises(
        interpose.InvalidArgument, match=r"a list of modules .* write model\.model\.layers\[0\]\.output"
    ):
        with model.trace("Hello"):
            layers = model.model.layers.save()
    assert not service.traces, (logits, mlp, layers)


def test_names_in_arithmetic_are_refused_at_their_line(service, model):
    with pytest.raises(interpose.InvalidArgument, match=f"computed with; {REMEDY}") as caught, model.trace("Hello"):
        x = 2 * (1 + model.logits)
    refusal(caught, "x = 2 * (1 + model.logits)")
    with pytest.raises(interpose.InvalidArgument, match=r"computed with; write model\.lm_head\.output"):
        with model.trace("Hello"):
            x = -model.lm_head
    with pytest.raises(interpose.UnknownLocation, match=r"indexed; write model\.logits\.output\[0\]"):
        with model.trace("Hello"):
            x = model.logits[0]
    with pytest.raises(interpose.UnknownLocation, match=r"'argmax'; write model\.logits\.output\.argmax"):
        with model.trace("Hello"):
            x = model.logits.argmax(-1)
    with pytest.raises(interpose.UnknownLocation, match=r"'shape'; write model\.lm_head\.output\.shape"):
        with model.trace("Hello"):
            x = model.lm_head.shape
    assert not service.traces, x


def test_a_name_that_is_assigned_is_refused_at_its_line(service, model):
    with pytest.raises(interpose.InvalidArgument, match=r"assign its value: model\.logits\.output = …") as caught:
        with model.trace("Hello"):
            model.logits = 0
    refusal(caught, "model.logits = 0")
    with pytest.raises(interpose.InvalidArgument, match=r"model\.model\.layers\[1\]\.output = …"):
        with model.trace("Hello"):
            model.model.layers[1] += 1
    with model.trace("Hello"):
        model.logits.output = model.logits.output * 0
        model.model.layers[1].output[0][:] = 0
    assert len(service.traces) == 1


def test_names_of_modules_are_passed_on_and_compared(service, model):
    """What a name is for still works."""

    def last(layer):
        return layer.output[0][-1]

    layer = model.model.layers[1]
    with model.trace("Hello"):
        rows = [last(one) for one in model.model.layers if one != layer].save()
        where = {layer.path: last(layer)}.save()
    assert len(service.traces) == 1, (rows, where)


def test_in_the_notebook_and_in_the_outer_block(service, model):
    uses = {
        "computed with": [lambda x: x + 1, lambda x: 1 - x, lambda x: x @ x, lambda x: -x, lambda x: abs(x)],
        "compared": [lambda x: x < 1, lambda x: x == 1, lambda x: x != 2.0, lambda x: np.ones(2) == x],
        "made into": [float, int, np.asarray],
        "gone through": [list, lambda x: next(iter(x))],
        "indexed": [lambda x: x[0], lambda x: x[:, -1], lambda x: x[:2]],
        "saved": [lambda x: x.save(), lambda x: x.save],
        "": [len, np.exp, np.stack],
    }
    for said, ways in uses.items():
        for way in ways[: -1 if said == "saved" else None]:
            with pytest.raises(interpose.InterposeError, match=REMEDY) as caught:
                way(model.logits)
            assert said in str(caught.value) or "numpy" in str(caught.value)
    with pytest.raises(interpose.InvalidArgument, match=REMEDY), model.trace() as tracer:
        shared = model.logits.save()
        with tracer.invoke("Hello"):
            x = [].save()
    assert (
        model.lm_head == model.lm_head and model.lm_head != model.model and model.lm_head != "x" and bool(model.logits)
    )
    assert model.model.layers[1] in list(model.model.layers) and {model.lm_head: 1}[model.lm_head] == 1
    assert not service.traces, (shared, x)


def test_torch_functions_are_refused_too(model):
    torch = pytest.importorskip("torch")
    uses = [
        lambda x: torch.softmax(x, -1),
        lambda x: torch.stack([x, x]),
        lambda x: torch.nn.functional.gelu(x),
        lambda x: torch.ones(2) + x,
        lambda x: torch.ones(2) == x,
        lambda x: torch.cat(tensors=(torch.ones(1), x)),
        lambda x: x @ torch.ones(2),
    ]
    for use in uses:
        with pytest.raises(interpose.InvalidArgument, match=REMEDY):
            use(model.logits)


def test_how_a_place_is_written():
    assert written("model.layers.2.mlp") == "model.model.layers[2].mlp" and written("") == "model"


def test_weights_are_values_of_a_block_and_are_not_written_to(service, model):
    down = model.model.layers[1].mlp.down_proj
    with model.trace("Hello"):
        row = model.model.layers[1].mlp.down_proj.weight[3].save()
        product = (down.weight @ down.weight.T).save()
    assert len(service.traces) == 1, (row, product)
    for outside in (lambda: down.weight, lambda: setattr(down, "weight", 0)):
        with pytest.raises(interpose.InvalidArgument, match=r"inside `with model\.trace"):
            outside()
    with (
        pytest.raises(interpose.InvalidArgument, match=r"down_proj\.weight is read-only") as caught,
        model.trace("Hello"),
    ):
        down.weight = 0
    refusal(caught, "down.weight = 0")
    with pytest.raises(interpose.InvalidArgument, match=r"mlp\.down_proj\.output\[:\] \+= delta") as caught:
        with model.trace("Hello"):
            model.model.layers[1].mlp.down_proj.weight[0] += 1
    with pytest.raises(interpose.UnknownLocation, match="did you mean weight"), model.trace("Hello"):
        x = down.wieght
    assert "weight" in dir(down) and len(service.traces) == 1, x
