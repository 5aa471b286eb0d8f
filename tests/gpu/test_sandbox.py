"""Sandboxed blocks of a model on a GPU: their values are on the CPU, and the model goes on with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.engine.interleave.test_sandbox import (
    BLOCKS,
    a_cache,
    a_patch_from_prompt_to_prompt,
    an_invoke_without_a_prompt,
    same,
)
from tests.engine.notebook import notebook

# What these compute themselves is a product or a sum of single elements, which the CPU and a GPU round alike.
NAMES = (
    "saved",
    "steered",
    "every step",
    "a list",
    "a module applied",
    "a lens",
    "a weight",
    "a token replaced",
    "a skip",
)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    made = LocalEngine(checkpoint, sandbox=True, dtype=request.param)
    yield made
    assert made.interleaver.idle, "a trace left something behind"
    made.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_block_gives_in_a_sandbox_what_it_gives_in_the_worker(engine: LocalEngine, name: str) -> None:
    ran = []
    for trusted in (True, False):
        engine.trusted = trusted
        ran.append(engine.run(Block([1, 2, 3, 4, 5], BLOCKS[name] + "\n", {"max_tokens": 3}), plain=([4, 5, 6],)))
    (here, beside), (there, beside_it) = ran
    assert here.failure is None and there.failure is None, (here.failure, there.failure)
    assert same(here.saved, there.saved)
    assert (here.token_ids, beside.token_ids) == (there.token_ids, beside_it.token_ids)


@pytest.mark.parametrize("trace", [a_patch_from_prompt_to_prompt, an_invoke_without_a_prompt, a_cache])
def test_a_trace_gives_in_a_sandbox_what_it_gives_in_the_worker(
    engine: LocalEngine, trace: Callable[[Any], list[Any]]
) -> None:
    made = []
    for trusted in (True, False):
        engine.trusted = trusted
        made.append(trace(notebook(engine)))
    assert same(*made), made
