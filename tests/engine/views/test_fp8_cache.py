"""A cache of eight-bit numbers (`kv_cache_dtype="fp8"`): values are those of transformers with keys and values cut to eight bits.

Such a number has three bits of mantissa. vLLM's CPU kernel cuts the others off, and does not round. The pattern would need keys
that the cache no longer has, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.engine.notebook import notebook
from tests.engine.quantised import BESIDE, OTHER, PROMPT, SAMPLING, distance
from tests.oracle import Edit, Oracle

NAMES = ("resid_pre", "attn.q", "attn.k", "attn.v", "attn.rot_q", "attn.rot_k", "attn.z", "attn_out", "resid_mid")
NAMES += ("mlp.gate", "mlp.up", "mlp.act", "mlp_out", "resid_post")
TOLERANCE = 1e-4
CACHED = ("attn.rot_k", "attn.v")


def cut(value: torch.Tensor) -> torch.Tensor:
    """Cut numbers to four bits of exponent and three of mantissa, towards zero."""
    exponent = (torch.frexp(value).exponent - 1).clamp(min=-6)
    unit = torch.ldexp(torch.ones_like(value), exponent - 3)
    return torch.trunc(value / unit) * unit


def edits(change: str = "") -> list[Edit]:
    """Return what the cache makes of keys and values, after a change of a value of the second layer, which halves it."""
    made = {f"blocks.{layer}.{name}": cut for layer in range(2) for name in CACHED}
    at = f"blocks.1.{change}"
    found = [Edit(path, "output", (lambda value: cut(value * 0.5)) if path == at else do) for path, do in made.items()]
    return found if not change or at in made else [Edit(at, "output", lambda value: value * 0.5), *found]


class Bench:
    """An engine with such a cache, and transformers."""

    def __init__(self, folder: Path) -> None:
        checkpoint = write_demo_model(folder / "llama", "llama", Shape(layers=2, hidden=128, context=256))
        self.engine = LocalEngine(checkpoint, dtype="float32", kv_cache_dtype="fp8")
        self.oracle = Oracle(checkpoint, canonical=True)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("fp8"))
    yield bench
    assert bench.engine.interleaver.idle
    bench.engine.close()


def test_values_are_those_of_keys_and_values_in_eight_bits(bench: Bench) -> None:
    reads = "\n".join(f"    values[{name!r}, step] = model.blocks[1].{name}.save()" for name in NAMES)
    logits = "    values['logits', step] = model.logits.output.save()\n"
    source = f"values = {{}}\nfor step in tracer.iter[:]:\n{reads}\n{logits}"
    traces = [[Block(prompt, source + "values.save()\n", SAMPLING)] for prompt in (PROMPT, OTHER)]
    rans = bench.engine.run_traces(traces, plain=tuple(BESIDE))
    for prompt, ran in zip((PROMPT, OTHER), rans, strict=False):
        assert ran.failure is None, ran.failure
        truth = bench.oracle.run(prompt, 2, edits(), force=ran.token_ids)
        whole = bench.oracle.run(prompt, 2, force=ran.token_ids)
        assert distance(truth.logits[0], whole.logits[0]) > 1e-2, "eight bits are to be seen"
        for (name, step), value in ran.saved["values"].items():
            expected = truth.logits[step] if name == "logits" else truth.value(f"blocks.1.{name}", step=step)
            if name in CACHED:  # a block gets them as they are before they lie in the cache
                value, expected = cut(value), cut(expected)
            assert value.shape == expected.shape
            assert distance(value, expected) <= TOLERANCE, f"{name} in step {step}"


@pytest.mark.parametrize("name", ["resid_pre", "attn.k", "attn.v", "attn.rot_q", "attn.z", "mlp.act"])
def test_a_change_does_what_it_does_in_transformers(bench: Bench, name: str) -> None:
    at = f"model.blocks[1].{name}"
    source = f"""\
logits = []
for step in tracer.iter[:]:
    {at} = {at} * 0.5
    logits.append(model.logits.output)
logits.save()
"""
    ran, *plain = bench.engine.run_traces([[Block(PROMPT, source, SAMPLING)]], plain=tuple(BESIDE))
    assert ran.failure is None and all(len(one.token_ids) == 4 for one in plain)
    truth = bench.oracle.run(PROMPT, 2, edits(name), force=ran.token_ids)
    for step, logits in enumerate(ran.saved["logits"]):
        assert distance(logits, truth.logits[step]) <= TOLERANCE


def test_the_pattern_is_refused_and_said_to_be(bench: Bench) -> None:
    [ran] = bench.engine.run(Block(PROMPT, "x = model.blocks[1].attn.pattern.save()"))
    assert ran.failure is not None and "the cache holds quantized keys (kv_cache_dtype fp8" in ran.failure.message
    assert "attn.rot_k" in ran.failure.message and "kv_cache_dtype auto" in ran.failure.message
    answer = notebook(bench.engine).serves("blocks[1].attn.pattern")
    assert not answer and "quantized keys" in answer.reason
    assert notebook(bench.engine).serves("blocks[1].attn.z")


def test_a_number_that_is_not_finite_stays_with_its_block(bench: Bench) -> None:
    alone = [bench.engine.plain(prompt).token_ids for prompt in BESIDE]
    source = "model.blocks[0].attn.v[:] = float('nan')\nx = model.blocks[1].resid_post.save()"
    ran, *plain = bench.engine.run_traces([[Block(PROMPT, source)]], plain=tuple(BESIDE))
    assert [one.token_ids for one in plain] == alone
    assert ran.failure is None or "finite" in ran.failure.message  # the kernel may make a number of it
    assert [bench.engine.plain(prompt).token_ids for prompt in BESIDE] == alone
