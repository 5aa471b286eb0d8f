"""Models with quantised weights, in bfloat16: canonical values, changes, applied modules, weights, and scans.

The truth is transformers' float32 forward on the same weights as plain numbers. A value may be twice as far from it as
transformers' own bfloat16 forward on the plain weights is; where a kernel rounds what a layer is given (INT8), that forward
rounds it too. FP8 and quantised experts need a processor with AMX, and are measured on GPUs (`tests/gpu/test_quantised.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.notebook import notebook
from tests.engine.quantised import NAMES, PROMPT, Quantised


@pytest.fixture(scope="module", params=["gptq", "awq", "w4a16", "int8"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quantised]:
    bench = Quantised(tmp_path_factory.mktemp("quantised"), request.param)
    yield bench
    assert bench.engine.interleaver.idle
    bench.engine.close()


def test_every_value_in_prefill_and_decode_beside_others(bench: Quantised) -> None:
    bench.check_every_value()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "attn.pattern"])
def test_a_change_does_what_it_does_in_transformers(bench: Quantised, name: str) -> None:
    bench.check_change(name)


def test_an_applied_module_computes_with_its_quantised_weights(bench: Quantised) -> None:
    bench.check_applied()


def test_a_quantised_weight_is_refused_and_a_plain_one_is_given(bench: Quantised) -> None:
    bench.check_weights()


def test_a_scan_has_the_shapes_of_a_trace(bench: Quantised) -> None:
    model = notebook(bench.engine)
    shapes = []
    for context in (model.scan(PROMPT), model.trace(PROMPT, max_tokens=1, temperature=0.0)):
        with context:
            given = model.model.layers[1].mlp.input
            act = model.blocks[1].mlp.act.save()
            applied = model.model.layers[1].mlp(given).save()
        shapes.append([(tuple(value.shape), value.dtype) for value in (act, applied)])
    assert shapes[0] == shapes[1]
    assert shapes[0][0] == ((len(PROMPT), 256), torch.bfloat16)
