"""The oracle says what stock vLLM computes: the same value at every location, and the same effect of an edit there.

Nothing of this system runs here. Plain torch hooks on vLLM's own modules are the witness for the layouts that the
oracle promises, so that a later disagreement with a trace is the trace's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.kept import KEPT
from tests.oracle import Edit, Oracle, difference, locations
from tests.oracle.checkpoints import ARCHITECTURES, make_checkpoint
from tests.oracle.location import Location, copy_of, write_into

PROMPT = [5, 400, 17, 99, 256, 31, 8]
STEPS = 9
TOLERANCE = 1e-4


class Probe:
    """Hooks in vLLM's model at every location, recording and, where told, editing."""

    def __init__(self, model: nn.Module, listed: list[Location]) -> None:
        self.values: dict[tuple[str, str, int], Any] = {}
        self.edit: Edit | None = None
        self.step = -1
        model.register_forward_pre_hook(self._begin_step)
        modules = dict(model.named_modules())
        for at in listed:
            module = modules["logits_processor" if at.path == "logits" else at.path]
            if at.kind == "input":
                module.register_forward_pre_hook(lambda _, args, at=at: (self._visit(at, args[0]), *args[1:]))
            else:
                module.register_forward_hook(lambda _, args, output, at=at: self._visit(at, output))

    def _begin_step(self, *_: object) -> None:
        self.step += 1

    def _visit(self, at: Location, value: Any) -> Any:
        self.values[at.path, at.kind, self.step] = copy_of(value)
        edit = self.edit
        if edit and (edit.path, edit.kind) == (at.path, at.kind) and (edit.steps is None or self.step in edit.steps):
            edited = edit.apply(copy_of(value))
            if not edit.in_place:
                return edited
            write_into(value, edited)
        return value


class Stock:
    """vLLM in this process with a probe in it."""

    def __init__(self, checkpoint: Path) -> None:
        from vllm import LLM

        self.checkpoint = checkpoint
        self.locations = locations(checkpoint)
        self.llm = LLM(
            str(checkpoint),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=32 << 20,
        )
        [self.probe] = self.llm.apply_model(lambda model: Probe(model, self.locations))

    def run(self, edit: Edit | None = None) -> list[int]:
        """Generate greedily; the probe then holds this run's values."""
        from vllm import SamplingParams, TokensPrompt

        self.probe.values, self.probe.edit, self.probe.step = {}, edit, -1
        sampling = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
        [request] = self.llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling, use_tqdm=False)
        return list(request.outputs[0].token_ids)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / request.param, request.param)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        KEPT.make_way()
        stock = Stock(checkpoint)
        yield stock
        stock.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def oracle(stock: Stock) -> Oracle:
    return Oracle(stock.checkpoint)


def test_every_value_agrees_in_prefill_and_decode(stock: Stock, oracle: Oracle) -> None:
    truth = oracle.run(PROMPT, STEPS)
    assert stock.run() == truth.tokens
    assert set(stock.probe.values) == set(truth.values)
    for key, value in truth.values.items():
        assert difference(stock.probe.values[key], value) < TOLERANCE, key


def disturbed(value: Any) -> Any:
    """Return a value whose every tensor is changed, each element of a pair differently."""
    if isinstance(value, torch.Tensor):
        return value * 0.5 + torch.linspace(-0.3, 0.3, value.shape[-1], device=value.device)
    return tuple(None if v is None else disturbed(v) * (1 + i) for i, v in enumerate(value))


@pytest.mark.parametrize("in_place", [False, True], ids=["replaced", "in_place"])
def test_an_edit_anywhere_has_the_same_effect(stock: Stock, oracle: Oracle, in_place: bool) -> None:
    plain = oracle.run(PROMPT, STEPS)
    for at in stock.locations:
        edit = Edit(at.path, at.kind, disturbed, steps={0, 2, 3}, in_place=in_place)
        truth = oracle.run(PROMPT, STEPS, [edit])
        assert difference(truth.logits[0], plain.logits[0]) > 1e-3, f"the edit of {at} has no effect to compare"
        assert stock.run(edit) == truth.tokens, str(at)
        for key, value in truth.values.items():
            assert difference(stock.probe.values[key], value) < TOLERANCE, (str(at), key)
