"""What single experts compute, asked for from inside the shared experts, when the router and they have begun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from interpose.cli.demo_model import write_model
from tests.engine.harness import Block, LocalEngine
from tests.fidelity.architectures import ALL, SHAPE

BLOCK = """\
mlp = model.blocks[1].mlp
beside = mlp.shared.{part}.clone()
act, out = mlp.expert_act.save(), mlp.expert_out.save()
"""
ALONE = "act, out = model.blocks[1].mlp.expert_act.save(), model.blocks[1].mlp.expert_out.save()"


@pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_next"])
def test_they_are_those_that_are_asked_for_before_the_layer(architecture: str, tmp_path: Path) -> None:
    engine = LocalEngine(write_model(tmp_path, ALL[architecture](), SHAPE), dtype="float32")
    prompt, sampling = [5, 400, 17, 99], {"max_tokens": 1}
    [alone] = engine.run(Block(prompt, ALONE, sampling))
    for part in ("gate", "act"):
        [ran] = engine.run(Block(prompt, BLOCK.format(part=part), sampling))
        assert ran.failure is None, ran.failure
        for value in ("act", "out"):
            assert torch.equal(ran.saved[value], alone.saved[value]), (part, value)
    engine.close()
