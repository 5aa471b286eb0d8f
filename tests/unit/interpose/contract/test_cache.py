"""What `tracer.cache()` gives in the notebook: by path, along the tree, one value or one for each step."""

from __future__ import annotations

import numpy as np
import pytest

import interpose
from interpose.contract.cache import Cache, Visit
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import Encoder
from tests.unit.interpose.conftest import finish, numbers


def recorded() -> Cache:
    steps = [Visit(output=numbers(3) + step, inputs=((numbers(2), 7), {"x": 1})) for step in range(2)]
    once = [Visit(output=(numbers(4), None))]
    return Cache({"model.layers.1.mlp": steps, "model.layers.1": once}, {"model.act": "it is split"})


def test_it_arrives_under_its_name(service, model):
    def script(service, trace):
        yield from finish(service, trace)
        yield service.saves(0, cache=recorded())

    service.script = script
    with model.trace("Hello", max_tokens=2) as tracer:
        cache = tracer.cache(modules=[model.model.layers[1]])
    assert isinstance(cache, Cache) and cache.keys() == ["model.layers.1.mlp", "model.layers.1"]
    first, second = cache["model.layers.1.mlp"].output
    assert np.array_equal(np.asarray(second), numbers(3) + 1) and len(cache["model.layers.1.mlp"]) == 2
    assert np.array_equal(np.asarray(cache.model.layers[1].mlp.output[0]), np.asarray(first))
    assert np.array_equal(np.asarray(cache.model.layers[1].output[0]), numbers(4))
    assert "model.layers.1" in cache and "model" not in cache and len(cache) == 2
    assert service.traces[0].invokes[0].program.source.startswith("cache = tracer.cache(")


def test_values_survive_the_wire_as_numpy_too():
    blobs: list[bytes] = []
    encoder = Encoder(inline_bytes=1 << 20, put_blob=lambda data: str(len(blobs)))
    value = encoder.encode(recorded())
    cache = Decoder(encoder.objects, get_blob=lambda blob: b"", library="numpy").decode(value)
    assert isinstance(cache["model.layers.1.mlp"].output[0], np.ndarray)
    assert cache["model.layers.1.mlp"].visits[0].input is not None
    assert cache["model.layers.1.mlp"].inputs[0][1] == {"x": 1}
    assert cache["model.layers.1"].input is None
    assert cache.refused == {"model.act": "it is split"}


def test_what_is_not_there():
    cache = recorded()
    with pytest.raises(KeyError, match="it is split"):
        cache["model.act"]
    with pytest.raises(KeyError, match="was not recorded"):
        cache["model.layers.2"]
    with pytest.raises(KeyError, match="by their paths"):
        cache[2]
    with pytest.raises(AttributeError, match="was not recorded"):
        cache.transformer
    with pytest.raises(AttributeError, match="was not recorded"):
        cache.model.norm
    with pytest.raises(KeyError, match="modules below it were"):
        cache.model.output
    assert "model.layers.1" in repr(cache) and "model.layers.1" in repr(cache.model.layers)


def test_outside_of_a_block(service, model):
    with pytest.raises(interpose.InvalidArgument, match="belongs inside a block with a prompt"):
        with model.trace() as tracer:
            cache = tracer.cache()
    with pytest.raises(interpose.UnknownLocation):
        with model.trace("x") as tracer:
            cache = tracer.cache(modules=[model.model.layers[9]])
