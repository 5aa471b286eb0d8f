"""Modules applied to a block's own values over two tensor-parallel ranks: whole values in, whole values out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import interpose
from tests.oracle import Oracle, difference

PROMPT = [5, 400, 17, 99, 256, 31, 8]
TOLERANCE = 1e-4


class Pair:
    """A served model, its parts by common names, and transformers' model."""

    def __init__(self, client: interpose.Client, name: str, checkpoint: Path) -> None:
        self.gpt2 = name == "gpt2"
        self.model: Any = client.model(name)
        self.oracle = Oracle(checkpoint)
        self.inner: Any = self.model.transformer if self.gpt2 else self.model.model
        self.layers: Any = self.inner.h if self.gpt2 else self.inner.layers
        self.norm: Any = self.inner.ln_f if self.gpt2 else self.inner.norm
        self.embed: Any = self.inner.wte if self.gpt2 else self.inner.embed_tokens

    def true_stream(self, layer: int) -> torch.Tensor:
        value = self.oracle.run(PROMPT).value(self.layers[layer].path)
        return value if self.gpt2 else value[0] + value[1]

    def true_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        model = self.oracle.model
        with torch.no_grad():
            return model.lm_head((model.transformer.ln_f if self.gpt2 else model.model.norm)(hidden))


@pytest.fixture(params=["llama", "gpt2"])
def pair(client: interpose.Client, checkpoints: dict[str, Path], request: pytest.FixtureRequest) -> Pair:
    return Pair(client, request.param, checkpoints[request.param])


def test_a_logit_lens_at_every_layer_beside_another_request(pair: Pair) -> None:
    model, layers, norm, gpt2 = pair.model, pair.layers, pair.norm, pair.gpt2
    with model.trace(temperature=0.0) as tracer:
        with tracer.invoke(PROMPT):
            lens = []
            for layer in layers:
                h = layer.output if gpt2 else layer.output[0] + layer.output[1]
                lens.append(model.lm_head(norm(h)).save())
            same = model.logits(norm(h)).save()
            logits = model.logits.output.save()
            late = model.lm_head(norm(h[-1])).save()
        with tracer.invoke([3, 77]):
            beside = model.lm_head(norm(layers[1].output if gpt2 else layers[1].output[0])).save()
    for i, value in enumerate(lens):
        assert difference(value, pair.true_logits(pair.true_stream(i))) <= TOLERANCE
    assert difference(same[-1:], logits) <= TOLERANCE
    assert difference(late, logits[0]) <= TOLERANCE
    assert beside.shape == (2, model.config["vocab_size"])


def test_sharded_modules_take_and_give_whole_values(pair: Pair) -> None:
    """Column-parallel, row-parallel, both in one, an embedding, and an activation between the two."""
    model, embed, gpt2 = pair.model, pair.embed, pair.gpt2
    mlp = pair.layers[1].mlp
    column = mlp.c_fc if gpt2 else mlp.gate_up_proj
    row = mlp.c_proj if gpt2 else mlp.down_proj
    activation = pair.layers[0].mlp.act if gpt2 else mlp.act_fn
    with model.trace(PROMPT, temperature=0.0):
        x = mlp.input.clone()
        whole = mlp(x).save()
        wide = column(x)[0]
        between = activation(wide).save()
        by_parts = row(between)[0].save()
        own_column = column.output[0].save()
        wide.save()
        own_row = row.output[0].save()
        output = mlp.output.save()
        rows = embed(torch.tensor([[7, 499], [0, 250]])).save()
    for value in (whole, by_parts, own_row):
        assert difference(value, output) <= TOLERANCE
    assert difference(wide, own_column) <= TOLERANCE
    assert between.shape == (len(PROMPT), wide.shape[-1] // (1 if gpt2 else 2))
    with torch.no_grad():
        expected = pair.oracle.model.get_input_embeddings()(torch.tensor([[7, 499], [0, 250]]))
    assert difference(rows, expected) <= TOLERANCE


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_applying_an_activation_does_not_make_its_location_whole(pair: Pair) -> None:
    """The location inside the sharded region stays refused after the module was applied to whole values."""
    mlp = pair.layers[1].mlp
    with pytest.raises(interpose.UnknownLocation, match="split over the tensor-parallel ranks"):
        with pair.model.trace(PROMPT):
            mlp.act_fn(torch.ones(2, 8))
            mlp.act_fn.output.save()


def test_a_block_that_goes_other_ways_on_the_ranks_hangs_nobody(pair: Pair) -> None:
    model, norm = pair.model, pair.norm
    width = model.config["n_embd" if pair.gpt2 else "hidden_size"]
    for other in (1, 2):
        with pytest.raises(interpose.InterventionError, match="different ways"):
            with model.trace(PROMPT):
                rank = torch.distributed.get_rank()
                if rank == 0:
                    model.lm_head(torch.ones(2, width))
                elif other == 2:
                    model.lm_head(torch.ones(3, width))
                norm.output.save()
    with model.trace(PROMPT, temperature=0.0):
        logits = model.logits.output.save()
    assert difference(logits, pair.oracle.run(PROMPT).logits[0]) <= TOLERANCE


def test_a_block_that_writes_other_values_on_the_ranks_fails(pair: Pair) -> None:
    model, layers = pair.model, pair.layers
    with pytest.raises(interpose.InterventionError, match=r"different values on the model's 2 ranks in step 1"):
        with model.trace(PROMPT, max_tokens=4, ignore_eos=True) as tracer:
            for _step in tracer.iter[1:]:
                layers[1].mlp.output[:] += int.from_bytes(os.urandom(2), "little") / 1e6
    with model.trace(PROMPT, max_tokens=4, ignore_eos=True) as tracer:
        for _step in tracer.iter[1:]:
            layers[1].mlp.output[:] += torch.rand(1) + numpy.random.rand()
        result = tracer.result.save()
    assert len(result.token_ids) == 4


def test_refusals_come_from_the_notebook_where_they_can(pair: Pair) -> None:
    model, layers, norm = pair.model, pair.layers, pair.norm
    with pytest.raises(interpose.InvalidArgument, match="holds attention") as caught:
        with model.trace(PROMPT):
            layers[1](torch.ones(2, 4))
    assert "layers[1](torch" in caught.value.frames[-1].text
    with pytest.raises(interpose.InvalidArgument, match=r"\[2, 3\]") as caught:
        with model.trace(PROMPT):
            norm(torch.ones(2, 3))
    assert "norm(torch.ones" in caught.value.frames[-1].text


def test_weights_are_read_whole(pair: Pair) -> None:
    """Over two ranks too, as the checkpoint has them: rows that lie on both, columns, and what each rank has."""
    embed, norm, mlp = pair.embed, pair.norm, pair.layers[1].mlp
    down = mlp.c_proj if pair.gpt2 else mlp.down_proj
    with pair.model.trace(PROMPT):
        rows = embed.weight[[5, 400]].save()
        table, matrix, scale = embed.weight.save(), down.weight.save(), norm.weight.save()
    state = pair.oracle.model.state_dict()
    assert torch.equal(table, state[f"{embed.path}.weight"]) and torch.equal(rows, table[[5, 400]])
    expected = state[f"{down.path}.weight"]
    assert torch.equal(matrix, expected.T if pair.gpt2 else expected)
    assert torch.equal(scale, state[f"{norm.path}.weight"])
    with pytest.raises(interpose.InvalidArgument, match="is read-only"), pair.model.trace(PROMPT):
        embed.weight[:] = 0
