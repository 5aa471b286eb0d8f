"""Hook names of TransformerLens: which value each has, and why others have none."""

from __future__ import annotations

import numpy as np
import pytest

import interpose
from interpose.compat.transformer_lens import ActivationCache, HookedModel
from interpose.contract import hook_names
from tests.unit.interpose.notebook.test_completion import described


@pytest.mark.parametrize(
    ("name", "layer", "part", "full"),
    [
        ("resid_post", 5, None, "blocks.5.hook_resid_post"),
        ("q", 0, None, "blocks.0.attn.hook_q"),
        ("pattern", 1, "attn", "blocks.1.attn.hook_pattern"),
        ("post", 2, "mlp", "blocks.2.mlp.hook_post"),
        ("mlp_out", 2, None, "blocks.2.hook_mlp_out"),
        ("normalized", 2, "ln2", "blocks.2.ln2.hook_normalized"),
        ("embed", None, None, "hook_embed"),
        ("blocks.3.attn.hook_z", None, None, "blocks.3.attn.hook_z"),
    ],
)
def test_short_names(name, layer, part, full):
    assert hook_names.full_name(name, layer, part) == full


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks.0.hook_attn_in", "the norm gives to attention is attn_in"),
        ("blocks.0.attn.hook_attn_scores", r"attn\.pattern"),
        ("ln_final.hook_scale", r"final_norm\.input"),
        ("blocks.0.hook_resid_pots", "did you mean blocks.0.hook_resid_post"),
        ("nothing", "there are hook_embed"),
    ],
)
def test_names_without_counterpart(name, message):
    with pytest.raises(KeyError, match=message):
        hook_names.place_of(name)


def test_a_model_has_the_hooks_of_its_values():
    hooked = HookedModel(described())
    assert list(hooked.hook_dict) == [
        f"blocks.{layer}.{name}" for layer in range(3) for name in ("attn.hook_q", "hook_resid_post")
    ]
    assert hooked.hook_dict["blocks.1.attn.hook_q"].envoy.path == "blocks.1.attn"
    assert hooked.cfg.n_layers == 3 and hooked.cfg.d_model == 64 and hooked.max_model_len == 32
    with pytest.raises(interpose.UnknownLocation, match="this model has none"):
        hooked.run_with_cache("Hello", names_filter="blocks.0.hook_resid_mid")
    with pytest.raises(interpose.UnknownLocation, match="the model has 3 layers"):
        hooked.run_with_cache("Hello", names_filter=["blocks.7.hook_resid_post"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"return_type": "loss"}, "compute it from them"),
        ({"prepend_bos": False}, "token ids"),
        ({"stop_at_layer": 1}, "names_filter"),
        ({"incl_bwd": True}, "inference mode"),
    ],
)
def test_arguments_without_counterpart(options, message):
    with pytest.raises(interpose.InvalidArgument, match=message):
        HookedModel(described()).run_with_cache("Hello", **options)
    with pytest.raises(interpose.InvalidArgument, match="one prompt"):
        HookedModel(described()).run_with_cache(["Hello", "there"])


def test_a_cache():
    values = {f"blocks.{layer}.hook_resid_post": np.full((1, 2, 4), layer) for layer in range(3)}
    cache = ActivationCache(values, 3)
    assert cache["resid_post", -1][0, 0, 0] == 2 and cache["blocks.1.hook_resid_post"][0, 0, 0] == 1
    assert cache.stack_activation("resid_post").shape == (3, 1, 2, 4)
    assert cache.stack_activation("resid_post", 2).shape == (2, 1, 2, 4)
    assert cache.remove_batch_dim()["resid_post", 0].shape == (2, 4)
    assert "<activations of 3 hooks" in repr(cache) and list(cache) == cache._ipython_key_completions_()
    with pytest.raises(KeyError, match="was not read"):
        cache["q", 0]
    with pytest.raises(KeyError, match="the norm gives to the MLP is mlp_in"):
        cache["mlp_in", 0]
    with pytest.raises(AttributeError, match="the stream after each layer"):
        cache.accumulated_resid()


def test_a_model_without_canonical_values(model):
    with pytest.raises(interpose.InvalidArgument, match="no canonical values"):
        HookedModel(model)
