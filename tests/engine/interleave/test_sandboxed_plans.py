"""Loops of sandboxed blocks of the tiny model as plans, beside other requests: equal to the block by turns.

On CPUs they are equal bit for bit. On GPUs the requests of two runs meet in other steps, and kernels for other numbers of rows
round otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import Block, LocalEngine, Ran
from tests.engine.interleave.test_sandbox import same

LOOP = "import torch\nkept = []\nfor step in tracer.iter[:]:\n"
LAYER = "model.model.layers[1].output[0]"
BLOCKS = {
    "a layer": LOOP + f"    kept.append({LAYER}.save())\n",
    "the residual stream": LOOP + "    kept.append(model.blocks[1].resid_post.save())\n",
    "steered": LOOP + "    model.blocks[0].resid_post[:] += vector * 3\n    kept.append(model.logits.output.save())\n",
    "scaled": LOOP + f"    model.model.layers[1].mlp.output[:] *= 2\n    kept.append({LAYER}.save())\n",
    "ablated": LOOP
    + "    model.model.layers[1].mlp.output = torch.zeros_like(model.model.layers[1].mlp.output)\n"
    + "    kept.append(model.logits.output.save())\n",
    "an autoencoder": LOOP
    + "    h = model.blocks[0].resid_post\n    acts = torch.relu(h @ into)\n    h[:] = acts @ into.T\n"
    + "    kept.append(acts.save())\n    kept.append(model.logits.output.save())\n",
    "a probe": LOOP + "    kept.append(torch.sigmoid(model.blocks[1].resid_post @ vector).save())\n",
    "a lens": LOOP
    + "    h = model.blocks[0].resid_post\n    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)\n"
    + "    kept.append((h @ into).log_softmax(-1).topk(3).values.save())\n",
    "the samples": LOOP + "    kept.append(model.samples.output.save())\n",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    made = LocalEngine(checkpoint, sandbox=True, plans=True, dtype="float32")
    yield made
    assert made.interleaver.idle, "a trace left something behind"
    made.close()


def run(engine: LocalEngine, source: str, trusted: bool) -> list[Ran]:
    engine.trusted = trusted
    torch.manual_seed(2)
    width = engine.llm.llm_engine.model_config.get_hidden_size()
    names = {"vector": torch.randn(width), "into": torch.randn(width, 2 * width) / width}
    sampling = {"max_tokens": 7, "ignore_eos": True}
    return engine.run(Block([1, 2, 3, 4, 5], source, sampling, names), plain=([4, 5, 6],))


def assert_alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    if not torch.cuda.is_available():
        assert same(one, other)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_planned_loop_gives_what_the_block_gives_in_the_workers(engine: LocalEngine, name: str) -> None:
    here, beside = run(engine, BLOCKS[name], True)
    there, beside_it = run(engine, BLOCKS[name], False)
    by_turns, _ = run(engine, BLOCKS[name] + "    if False:\n        print()\n", False)  # no plan prints
    assert here.failure is None and there.failure is None and by_turns.failure is None
    assert_alike(here.saved["kept"], there.saved["kept"])
    assert_alike(there.saved["kept"], by_turns.saved["kept"])
    assert here.token_ids == there.token_ids == by_turns.token_ids and beside.token_ids == beside_it.token_ids
    assert there.accounting is not None and by_turns.accounting is not None
    tiers = {tier.tier: tier.steps for tier in there.accounting.tiers}
    assert tiers["plan"] == 5 and "plan" not in {tier.tier for tier in by_turns.accounting.tiers}


def test_two_blocks_beside_each_other_have_plans_of_their_own(engine: LocalEngine) -> None:
    engine.trusted = False
    source = BLOCKS["scaled"].replace("*= 2", "*= {0}")
    traces = [[Block([5 + i, 9, 17], source.format(i), {"max_tokens": 6, "ignore_eos": True})] for i in (1, 2, 3)]
    together = engine.run_traces(traces)
    alone = [engine.run_traces([one])[0] for one in traces]
    for one, other in zip(together, alone, strict=True):
        assert one.failure is None and other.failure is None and one.token_ids == other.token_ids
        for mine, yours in zip(one.saved["kept"], other.saved["kept"], strict=True):
            torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)
