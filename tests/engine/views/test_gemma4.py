"""Gemma 4 adds a part to the stream after the MLP and scales the sum: its stream is transformers', read and changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.block.fiber import Fiber  # noqa: F401 - before transformers makes a model, see there
from interpose.cli.demo_model import Shape, write_model
from tests.engine.harness import Block, LocalEngine
from tests.oracle import difference

PROMPT = [5, 400, 17, 99, 256, 31, 8]
STEPS = 3
SHAPE = Shape(layers=2, hidden=128, context=256)
VALUES = ("resid_pre", "resid_mid", "resid_post")


class Truth:
    """The model in transformers.

    Attributes:
        seen: the stream of each step by its name, [tokens, hidden].
    """

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.seen: dict[tuple[str, int], torch.Tensor] = {}
        self._step = 0
        self._edit: Callable[[str, torch.Tensor], None] = lambda name, stream: None
        for i, layer in enumerate(self._model.model.layers):
            layer.register_forward_pre_hook(self._before(f"blocks[{i}].resid_pre"))
            layer.pre_feedforward_layernorm.register_forward_pre_hook(self._before(f"blocks[{i}].resid_mid"))
            layer.register_forward_hook(self._after(f"blocks[{i}].resid_post"))

    def _before(self, name: str) -> Any:
        return lambda _, args: self._visit(name, args[0])

    def _after(self, name: str) -> Any:
        return lambda _, args, output: self._visit(name, output[0] if isinstance(output, tuple) else output)

    def _visit(self, name: str, stream: torch.Tensor) -> None:
        self.seen[name, self._step] = stream[0].clone()
        self._edit(name, stream[0])

    @torch.no_grad()
    def run(self, edit: Callable[[str, torch.Tensor], None] = lambda name, stream: None) -> list[torch.Tensor]:
        """Generate; return the logits of each step, [1, vocab]. `edit` may change the stream in place."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        self._edit, ids, logits = edit, PROMPT, []
        for self._step in range(STEPS):
            output = self._model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits.append(output.logits[0])
            ids = [int(output.logits.argmax())]
        return logits


@pytest.fixture(scope="module", params=[(16, 1.0), (16, 0.7), (0, 0.7)], ids=["inputs", "both", "scalar"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With inputs of each layer's own, with a scalar that is not one, and with both."""
    from safetensors.torch import load_file, save_file
    from transformers import Gemma4TextConfig

    width, scalar = request.param
    config = Gemma4TextConfig(
        hidden_size=SHAPE.hidden,
        intermediate_size=2 * SHAPE.hidden,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_size,
        global_head_dim=SHAPE.head_size,
        hidden_size_per_layer_input=width,
        vocab_size_per_layer_input=SHAPE.vocab,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        max_position_embeddings=SHAPE.context,
    )
    path = write_model(tmp_path_factory.mktemp("checkpoint") / "gemma4", config, SHAPE)
    file = path / "model.safetensors"
    weights = load_file(file)
    for name, value in weights.items():
        if name.endswith("layer_scalar"):
            value.fill_(scalar)
    save_file(weights, file, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> Truth:
    return Truth(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(checkpoint, dtype="float32")
    yield engine
    engine.close()


def test_the_stream_is_read(engine: LocalEngine, truth: Truth) -> None:
    names = [f"blocks[{i}].{value}" for i in range(SHAPE.layers) for value in VALUES]
    reads = "".join(f"    values[{name!r}, step] = model.{name}\n" for name in names)
    source = f"values = {{}}\nfor step in tracer.iter[:]:\n{reads}values.save()"
    [ran] = engine.run(Block(PROMPT, source, {"max_tokens": STEPS, "ignore_eos": True}))
    assert ran.failure is None, ran.failure
    assert ran.token_ids == [int(logits.argmax()) for logits in truth.run()]
    assert len(ran.saved["values"]) == len(names) * STEPS
    for key, value in ran.saved["values"].items():
        assert difference(value, truth.seen[key]) <= 1e-4, key


@pytest.mark.parametrize("value", VALUES)
def test_the_stream_is_changed(engine: LocalEngine, truth: Truth, value: str) -> None:
    name = f"blocks[1].{value}"
    ramp = torch.linspace(-1, 1, SHAPE.hidden)
    source = f"logits = []\nfor step in tracer.iter[:]:\n    model.{name} += ramp\n    logits.append(model.logits.output.save())"
    [ran] = engine.run(Block(PROMPT, source, {"max_tokens": STEPS, "ignore_eos": True}, {"ramp": ramp}))
    assert ran.failure is None, ran.failure

    def add(where: str, stream: torch.Tensor) -> None:
        if where == name:
            stream += ramp

    for step, logits in enumerate(truth.run(add)):
        assert difference(ran.saved["logits"][step], logits) <= 1e-4
