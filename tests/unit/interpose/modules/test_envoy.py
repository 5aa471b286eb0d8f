"""The module tree of the notebook: navigation, printing, near misses."""

from __future__ import annotations

import copy
import pickle

import pytest

import interpose

TREE = """\
LlamaForCausalLM(
  (model): LlamaModel(
    (embed_tokens): VocabParallelEmbedding()
    (layers): ModuleList(
      (0-2): 3 x LlamaDecoderLayer(
        (self_attn): LlamaAttention()
        (mlp): LlamaMLP(
          (down_proj): RowParallelLinear(in_features=96, out_features=64, weight: float32[64, 96])
        )
      )
    )
    (norm): RMSNorm()
  )
  (lm_head): ParallelLMHead()
  (logits): Location()
  (samples): Location()
)"""


def test_printing(model):
    assert repr(model) == TREE
    assert str(model.lm_head) == "ParallelLMHead()"


def test_navigation(model):
    layers = model.model.layers
    assert layers[1].mlp.path == "model.layers.1.mlp" and layers[-1] == layers[2]
    assert [layer.path for layer in layers[1:]] == ["model.layers.1", "model.layers.2"]
    assert len(layers) == 3 == len(list(layers)) and layers[0] in list(layers)
    assert {layers[0]: 1}[model.model.layers[0]] == 1
    assert "mlp" in dir(layers[0]) and "output" in dir(layers[0])
    assert model.logits.path == "logits"


@pytest.mark.parametrize(
    "use, suggestions",
    [
        (lambda m: m.modle, ("model",)),
        (lambda m: m.layers, ("model.layers",)),
        (lambda m: m.model.layers[0].atn, ()),
        (lambda m: m.model.layers[0].self_atn, ("self_attn",)),
        (lambda m: m.logit, ("logits",)),
    ],
)
def test_near_misses(model, use, suggestions):
    with pytest.raises(interpose.UnknownLocation) as caught:
        use(model)
    assert set(suggestions) <= set(caught.value.suggestions)


def test_a_module_without_numbers(model):
    with pytest.raises(interpose.UnknownLocation, match="cannot be indexed; write model.model.norm.output"):
        model.model.norm[0]
    with pytest.raises(interpose.InvalidArgument, match="numbered"):
        model.model.layers["0"]


def test_copies_and_facts(model):
    assert copy.copy(model.model.norm) == copy.deepcopy(model.model.norm) == model.model.norm
    with pytest.raises(TypeError, match="connection"):
        pickle.dumps(model)
    assert model.config == {"hidden_size": 64} and model.generation_config == {} and model.max_model_len == 32
