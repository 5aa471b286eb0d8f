"""Shared experts of a mixture, which vLLM runs on a stream of their own in short steps: blocks see them whole, in one order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from executor.model.streams import StepStream
from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.gpu.conftest import deployed
from tests.oracle import difference

SHORT, LONG = [5, 400, 17, 99, 256, 31, 8], [5 + 7 * i % 480 for i in range(300)]  # vLLM's bound is 256 tokens
MLP = "model.model.layers[1].mlp"
READ = f"""\
given = {MLP}.input.clone()
router = {MLP}.gate.output[0].save()
torch.cuda._sleep(200_000_000)
inner = {MLP}.shared_expert.act_fn.output.save()
torch.cuda._sleep(200_000_000)
shared = {MLP}.shared_expert.output.save()
double = (shared * 2).save()
out = {MLP}.experts.output.save()
again = {MLP}.shared_expert(given).save()
"""


@pytest.fixture(scope="module", params=["eager", "graphs"])
def engine(
    request: pytest.FixtureRequest, runner: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    """A mixture with a shared expert, of random weights that vLLM makes."""
    shape = Shape(layers=2, hidden=128, context=512)
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "mixture", "qwen3_moe", shape)
    options = deployed("float32") if request.param == "graphs" else {"dtype": "float32"}
    engine = LocalEngine(
        checkpoint,
        hf_overrides={"shared_expert_intermediate_size": 2 * shape.hidden},
        load_format="dummy",
        max_model_len=shape.context,
        **options,
    )
    yield engine
    assert engine.interleaver.idle, "a trace left something behind"
    engine.close()


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_what_a_shared_expert_gives_is_there_when_a_block_reads_it(engine: LocalEngine, prompt: list[int]) -> None:
    """The router comes first, whatever the number of tokens."""
    experts = engine.worker.model_runner.kernels._beside
    assert len(experts) == 2, "vLLM has streams for the shared experts of both layers"
    alone = engine.plain(SHORT).token_ids
    [ran, plain] = engine.run(Block(prompt, READ), plain=(SHORT,))
    assert ran.failure is None, ran.failure
    size = float(ran.saved["again"].abs().max())
    assert size > 0
    assert difference(ran.saved["shared"], ran.saved["again"]) <= 1e-4 * size
    assert torch.equal(ran.saved["double"], ran.saved["shared"] * 2)
    assert ran.saved["inner"].shape == (len(prompt), 256) and ran.saved["router"].shape == (len(prompt), 8)
    assert plain.token_ids == alone
    assert all(part._stream is not None for part in experts), "steps without blocks have their streams again"


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_what_a_block_makes_of_it_is_what_the_model_goes_on_with(engine: LocalEngine, prompt: list[int]) -> None:
    """Without the shared expert, the layer gives what its experts give."""
    source = (
        f"shared = {MLP}.shared_expert.output.clone()\ntorch.cuda._sleep(200_000_000)\n"
        f"{MLP}.shared_expert.output[:] = 0\nout = {MLP}.output.save()\nshared.save()"
    )
    [changed] = engine.run(Block(prompt, source))
    [untouched] = engine.run(Block(prompt, f"out = {MLP}.output.save()"))
    assert changed.failure is None and untouched.failure is None, (changed.failure, untouched.failure)
    expected = untouched.saved["out"] - changed.saved["shared"]
    size = float(untouched.saved["out"].abs().max())
    assert difference(changed.saved["out"], expected) <= 1e-4 * size


def test_a_block_on_another_stream_waits_for_it_and_is_waited_for() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    main, beside = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(main):
        step = StepStream(device)
        step.begin()
        x = torch.zeros(1 << 20, device=device)
        with torch.cuda.stream(beside):
            beside.wait_stream(main)
            torch.cuda._sleep(500_000_000)
            x.fill_(7)
            seen = step.visit(lambda: x.clone())
            changed = step.visit(lambda: (torch.cuda._sleep(500_000_000), seen + 1)[1])
            ended = changed.sum()
        total = seen.sum()
        main.wait_stream(beside)
        assert float(total) == 7 << 20
        assert float(ended) == 8 << 20
