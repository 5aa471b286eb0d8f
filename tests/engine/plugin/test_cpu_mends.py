"""Models that vLLM's CPU build gets wrong by itself, in plain requests and in traces: `executor.plugin.cpu_mends`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.rotary_embedding import get_rope

from executor.block.fiber import Fiber  # noqa: F401 - before transformers makes a model, see there
from interpose.cli.demo_model import write_model
from tests.engine.harness import EVERY_STEP, Block, LocalEngine
from tests.fidelity.architectures import ALL, SHAPE
from tests.oracle import Edit, Oracle, difference

STEPS = 3
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "max_num_batched_tokens": 256,
    "disable_log_stats": True,
}
READ = "added = model.blocks[1].attn_out.save()\n"
HALVE = "model.blocks[0].resid_post[:] = model.blocks[0].resid_post * 0.5\n"
# Around the edges of cache blocks of 96 tokens, which hold as many bytes as a state.
LENGTHS = (3, 40, 96, 97, 150, 200)
PROMPTS = [[(7 * i + 13 * n) % 490 + 5 for i in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("column", ["granitemoehybrid", "deepseek_v2"])
def test_an_engine_without_traces_generates_what_transformers_does(tmp_path: Path, column: str) -> None:
    path = write_model(tmp_path / column, ALL[column](), SHAPE)
    llm = LLM(
        model=str(path),
        worker_cls="executor.plugin.worker_plain_cpu.PlainCPUWorker",
        additional_config={"interpose": {"untraced": "why"}},
        **OPTIONS,
    )
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
    oracle = Oracle(path)
    assert [list(one.outputs[0].token_ids) for one in outputs] == [oracle.run(one, STEPS).tokens for one in PROMPTS]
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


class Served:
    """A model in an engine with a prefix cache, and in transformers."""

    def __init__(self, folder: Path, column: str) -> None:
        path = write_model(folder / column, ALL[column](), SHAPE)
        self.oracle = Oracle(path)
        self.engine = LocalEngine(path, **OPTIONS)

    def generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of plain requests that run together, and how many tokens of each prompt were cached."""
        params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
        outputs = self.engine.llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs], [one.num_cached_tokens or 0 for one in outputs]


@pytest.fixture(scope="module", params=["granitemoehybrid", "nemotron_h", "deepseek_v2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("checkpoint"), request.param)
    yield served
    assert served.engine.interleaver.idle
    served.engine.close()


def test_plain_requests_generate_what_transformers_does(served: Served) -> None:
    truth = [served.oracle.run(prompt, STEPS).tokens for prompt in PROMPTS]
    for prompt, tokens in zip(PROMPTS, truth, strict=True):
        assert served.generate([prompt])[0] == [tokens], f"{len(prompt)} tokens, alone"
    tokens, cached = served.generate(PROMPTS)
    assert tokens == truth
    caches = served.engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    assert any(cached) == caches


def test_traces_read_what_transformers_has_beside_plain_prompts(served: Served) -> None:
    blocks = [[Block(prompt, READ + EVERY_STEP, {"max_tokens": STEPS, "ignore_eos": True})] for prompt in PROMPTS]
    for _ in range(2):  # the second time plain prompts come from the cache
        rans = served.engine.run_traces(blocks, plain=tuple(PROMPTS))
        for prompt, ran in zip(PROMPTS * 2, rans, strict=True):
            assert ran.failure is None, ran.failure
            truth = served.oracle.run(prompt, len(ran.token_ids), canonical=True)
            assert ran.token_ids == truth.tokens
            if ran.saved:
                assert difference(ran.saved["added"], truth.value("blocks.1.attn_out")) <= 1e-4
            for mine, true in zip(ran.saved.get("logits", []), truth.logits, strict=False):
                assert difference(mine, true) <= 1e-4


def test_changes_are_those_of_transformers_across_edges_of_cache_blocks(served: Served) -> None:
    half = Edit("blocks.0.resid_post", "output", lambda value: value * 0.5, steps={0})
    blocks = [[Block(prompt, HALVE + EVERY_STEP, {"max_tokens": STEPS, "ignore_eos": True})] for prompt in PROMPTS]
    for prompt, ran in zip(PROMPTS, served.engine.run_traces(blocks, plain=tuple(PROMPTS[-2:])), strict=False):
        assert ran.failure is None, ran.failure
        truth = served.oracle.run(prompt, STEPS, [half], canonical=True)
        assert ran.token_ids == truth.tokens
        for mine, true in zip(ran.saved["logits"], truth.logits, strict=True):
            assert difference(mine, true) <= 1e-4


def test_the_kernel_still_rotates_three_dimensions_wrongly() -> None:
    """If vLLM's kernel is right, the mend is not needed any more."""
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(64, 256, False, {"rope_type": "default", "rope_theta": 10000.0})
    positions, query, key = torch.arange(8), torch.randn(8, 4, 96)[..., 32:], torch.randn(8, 1, 64)
    right, _ = rope.forward_native(positions[:2], query[:2], key[:2])
    rotated, _ = rope.forward_cpu(positions[:2], query[:2].clone(), key[:2].clone())
    assert difference(rotated, right) > 1e-2
