"""Models that vLLM has no code for run through its Transformers backend: what is rows there is given, the rest is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from interpose.cli.demo_model import ARCHITECTURES, Shape, write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.engine.harness import Block, LocalEngine, close

SHAPE = Shape(layers=2, hidden=128, context=256)
PROMPTS = [[5, 400, 17, 99, 256], [3]]
STEPS = 3
GIVEN = """
hidden, logits = [], []
for step in tracer.iter[:]:
    hidden.append(model.output)
    logits.append(model.logits.output)
hidden.save()
logits.save()
"""
GREEDY = {"max_tokens": STEPS, "ignore_eos": True}


def neox(shape: Shape) -> GPTNeoXConfig:
    return GPTNeoXConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        intermediate_size=2 * shape.hidden,
        max_position_embeddings=shape.context,
    )


class Model:
    """An engine, and for each prompt transformers' tokens, last hidden rows and logits."""

    def __init__(self, checkpoint: Path) -> None:
        truth = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        self.truth = [self._run(truth, prompt) for prompt in PROMPTS]  # the engine changes transformers' classes
        self.engine = LocalEngine(checkpoint, dtype="float32")

    @staticmethod
    @torch.no_grad()
    def _run(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        ids = list(prompt)
        for _ in range(STEPS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        whole = model(torch.tensor([ids[:-1]]), output_hidden_states=True)
        return ids[len(prompt) :], whole.hidden_states[-1][0], whole.logits[0, len(prompt) - 1 :]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(ARCHITECTURES, "gpt_neox", neox)
        checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "gpt_neox", "gpt_neox", SHAPE)
    served = Model(checkpoint)
    yield served
    assert served.engine.interleaver.idle, "a trace left something behind"
    served.engine.close()


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_the_models_own_output_and_the_logits_are_given(served: Model, together: bool) -> None:
    blocks = [[Block(prompt, GIVEN, GREEDY)] for prompt in PROMPTS]
    rans = (
        served.engine.run_traces(blocks)
        if together
        else [ran for block in blocks for ran in served.engine.run_traces([block])]
    )
    for ran, (tokens, hidden, logits) in zip(rans, served.truth, strict=True):
        assert ran.failure is None, ran.failure
        assert ran.token_ids == tokens
        assert close(torch.cat(ran.saved["hidden"]), hidden)
        assert close(torch.cat(ran.saved["logits"]), logits)


@pytest.mark.parametrize(
    "at", ["layers[1].output", "layers[1].mlp.input", "embed_in.output", "final_layer_norm.output"]
)
def test_what_is_not_rows_is_refused_in_steps_of_one_row_too(served: Model, at: str) -> None:
    for prompt in PROMPTS:  # the second has one token: its values would look like rows
        [ran] = served.engine.run(Block(prompt, f"value = model.model.{at}.save()\n"))
        assert ran.failure is not None
        assert ran.failure.code == pb.ERROR_CODE_UNKNOWN_LOCATION
        assert "Transformers backend" in ran.failure.message
        assert "model.output" in ran.failure.message


def test_a_module_that_is_not_rows_is_not_written_or_skipped_either(served: Model) -> None:
    for statement in (
        "model.model.layers[1].output = torch.zeros(1, 128)",
        "model.model.layers[1].mlp.skip(torch.zeros(1, 128))",
    ):
        [ran] = served.engine.run(Block(PROMPTS[1], f"{statement}\n"))
        assert ran.failure is not None
        assert "Transformers backend" in ran.failure.message
