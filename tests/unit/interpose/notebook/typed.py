"""What a notebook writes, for a type checker: the names of a block are bound after it, and values are not modules."""

from __future__ import annotations

from typing import Any, assert_type

import interpose

client = interpose.connect("localhost:9000")
model = client.model()
layer = model.model.layers[2]
assert_type(layer, interpose.Envoy)
assert_type(model.model.layers[1:], list[interpose.Envoy])


def one_prompt() -> Any:
    with model.trace("Hello", max_tokens=3) as tracer:
        assert_type(tracer, interpose.Tracer)
        hidden = layer.output[0].save()
        for step in tracer.iter[1:]:
            assert_type(step, int)
            model.blocks[1].resid_post[-1] += hidden
            model.blocks[1].mlp.act[:] = 0
        cache = tracer.cache(modules=[layer])
        if hidden is None:
            tracer.stop()
        row = model.lm_head.weight[5].save()
        text = tracer.result
    assert_type(cache, interpose.Cache)
    return hidden, row, text, cache["model.layers.2"].output


async def awaited() -> Any:
    client = await interpose.connect_async("localhost:9000")
    model = await client.model()
    async with model.trace("Hello") as tracer:
        assert_type(tracer, interpose.Tracer)
        hidden = model.model.norm.output.save()
    return hidden


def several() -> None:
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke("Hello") as one:
            barrier()
            for _ in one.all():
                pass
    print(one.result, one.accounting.steps)
    with model.edit("calm") as edit:
        for _ in edit.iter[:]:
            layer.output[0][:] = 0
    edit.clear()


model.model.layers["two"]  # error: an index is a number
tracer = model.trace("Hello", max_tokens=3)
tracer.iterate  # error: a tracer has no such name
tracer.result.text.upper()
model.generate("Hello").text.upper()
