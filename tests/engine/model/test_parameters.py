"""A block reads the model's weights as transformers has them.

The tests of `tests.engine.parallel` have the same over two ranks and over two stages, where weights are whole too.
"""

from __future__ import annotations

import pytest
import torch

from interpose.contract.names import written
from interpose.v1 import trace_pb2 as pb
from tests.engine.conftest import Bench
from tests.engine.harness import Block, check_failed
from tests.oracle import difference

PROMPT = [5, 400, 17, 99, 256]

pytestmark = pytest.mark.parametrize("bench", ["llama"], indirect=True)


def expected(bench: Bench) -> dict[str, torch.Tensor]:
    """Return the weights of the checkpoint, those that vLLM merges side by side, by their paths in vLLM."""
    state = {name: value.detach() for name, value in bench.oracle.model.state_dict().items()}
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    found = {name: state[name] for name in names}
    for layer in (0, 3):
        at = f"model.layers.{layer}"
        for name in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = state[f"{at}.{name}.weight"]
        for merged, parts in {"self_attn.qkv_proj": "q k v", "mlp.gate_up_proj": "gate up"}.items():
            owner = merged.partition(".")[0]
            pieces = [state[f"{at}.{owner}.{part}_proj.weight"] for part in parts.split()]
            found[f"{at}.{merged}.weight"] = torch.cat(pieces)
    return found


def test_every_weight_is_the_checkpoints(bench: Bench) -> None:
    weights = expected(bench)
    reads = "\n".join(f"    kept[{path!r}] = {written(path)}.save()" for path in weights)
    source = f"kept = {{}}\nfor step in tracer.iter[:1]:\n{reads}\nlogits = model.logits.output.save()\n"
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    for path, weight in weights.items():
        assert torch.equal(ran.saved["kept"][path], weight), path
    described = {module.path: module for module in bench.engine.describe().modules}
    for path, weight in weights.items():
        owner, _, name = path.rpartition(".")
        assert {one.name: list(one.shape) for one in described[owner].parameters}[name] == list(weight.shape)


def test_they_compute_with_the_values_of_the_model(bench: Bench) -> None:
    """In the middle of the pass, before it and after it; a row of the unembedding is a direction of the stream."""
    source = (
        "early = model.model.embed_tokens.weight[[5, 400]].save()\nmlp = model.model.layers[1].mlp\n"
        "x = mlp.down_proj.input\ny = (x @ mlp.down_proj.weight.T).save()\nz = mlp.down_proj.output[0].save()\n"
        "h = model.model.norm.output[0]\nlogits = model.logits.output\nrow = (h[-1] @ model.lm_head.weight[77]).save()\n"
        "expected = logits[0, 77].save()\nresult = tracer.result\nlate = model.lm_head.weight.shape[0]\nlate.save()\n"
    )
    [ran] = bench.engine.run(Block(PROMPT, source))
    assert ran.failure is None, ran.failure
    assert torch.equal(ran.saved["early"], expected(bench)["model.embed_tokens.weight"][[5, 400]])
    assert difference(ran.saved["y"], ran.saved["z"]) <= 1e-4
    assert difference(ran.saved["row"], ran.saved["expected"]) <= 1e-4
    assert ran.saved["late"] == 500


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("model.lm_head.weight[:] = 0\nmodel.logits.output", 2),
        ("w = model.lm_head.weight\nw += 1", None),
        ("model.lm_head.weight = torch.zeros(500, 64)", 1),
    ],
)
def test_a_write_is_refused_and_reaches_nobody(bench: Bench, source: str, line: int | None) -> None:
    before = bench.engine.plain(PROMPT).token_ids
    [ran] = bench.engine.run(Block(PROMPT, source))
    check_failed(ran, pb.ERROR_CODE_INVALID_ARGUMENT, "model.lm_head.weight is read-only", line)
    assert bench.engine.plain(PROMPT).token_ids == before
    [fine] = bench.engine.run(Block(PROMPT, "w = model.lm_head.weight.clone()\nw[:] = 0\nw = w.sum().save()"))
    assert fine.failure is None and not fine.saved["w"]


def test_a_name_that_there_is_not(bench: Bench) -> None:
    [ran] = bench.engine.run(Block(PROMPT, "model.lm_head.wieght"))
    check_failed(ran, pb.ERROR_CODE_UNKNOWN_LOCATION, "did you mean weight", 1)
