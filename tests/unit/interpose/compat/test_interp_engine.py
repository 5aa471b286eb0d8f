"""interp-engine's names: addresses, which value each point has, and why others have none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import interpose
from interpose.compat.interp_engine import Address, Cache, ServedModel, capture, load_model, parse_address, to_address
from tests.unit.interpose.notebook.test_completion import described

POST = Address("resid_post", 10)


@pytest.mark.parametrize(
    "given", [POST, "resid_post.10", ("resid_post", 10), SimpleNamespace(name="resid_post", layer=10, stream=None)]
)
def test_an_address_in_every_form(given):
    assert to_address(given) == POST and str(to_address(given)) == "resid_post.10"


def test_a_point_of_the_model_has_no_layer():
    assert parse_address("final_norm") == Address("final_norm") and str(Address("final_norm")) == "final_norm"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("path.model.layers.5.mlp.down_proj", r"model\.model\.layers\[5\]\.mlp\.down_proj\.output"),
        ("resid_post:5", "is no address"),
        ("resid_post.5.stream-1", "is no address"),
        (("resid_post", 5, 1), "one residual stream"),
        (7, "is no address"),
    ],
)
def test_what_is_no_address(given, message):
    with pytest.raises(interpose.InvalidArgument, match=message):
        to_address(given)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("attn_scores.0", "the probabilities are attn_probs"),
        ("attn_out.0", "what is added to the stream is attn_out_post"),
        ("lm_head", r"model\.logits\(model\.final_norm\.output\)"),
        ("resid_mid.0", "this model has none"),
        ("q_norm_in.0", r"no norm of queries; the queries are model\.blocks\[i\]\.attn\.q"),
        ("mlp_act.0", "it has no mlp"),
        ("resid_post", r"write resid_post\.0"),
        ("resid_post.3", "the model has 3 layers"),
        ("final_norm.1", "takes no layer"),
        ("final_norm", "it has no final_norm"),
        ("resid_pots.1", "there is no point 'resid_pots'; there are resid_post"),
    ],
)
def test_points_without_counterpart(point, message):
    with pytest.raises(interpose.UnknownLocation, match=message):
        capture(described(), "Hello", ["resid_post.0", point])
    assert ServedModel(described()).refuses("resid_post", 2) is None
    assert ServedModel(described()).refuses(point)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": [1]}, "nothing is padded"),
        ({"detach": False}, "no gradient goes through"),
        ({"steering_spec": object()}, "resid_post [+]= scale"),
    ],
)
def test_arguments_without_counterpart(options, message):
    with pytest.raises(interpose.InvalidArgument, match=message):
        capture(described(), "Hello", ["resid_post.0"], **options)


def test_a_cache_is_read_by_address_text_and_name():
    value = np.ones((1, 2, 4))
    cache = Cache({POST: value})
    assert cache[POST] is cache["resid_post.10"] is cache.get("resid_post", 10) is value
    assert "resid_post.10" in cache and POST in cache and "resid_post.9" not in cache and 7 not in cache
    with pytest.raises(KeyError, match=r"resid_post\.9 was not captured; there are resid_post\.10"):
        cache["resid_post.9"]


def test_a_model_is_found_by_its_name(service, client):
    model = load_model("org/tiny-llama", client=client, backend="vllm-static", dtype="float32")
    assert model.name == "tiny-llama"
    with pytest.raises(interpose.InvalidArgument, match="takes no prepend_bos: .* as ids"):
        model.to_tokens("Hello", prepend_bos=True)
    with pytest.raises(interpose.InvalidArgument, match="takes no 'revision'"):
        load_model("tiny-llama", client=client, revision="main")
