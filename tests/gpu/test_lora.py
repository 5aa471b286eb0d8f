"""Adapters on GPUs: in half precision, as vLLM's kernels take them; in float32 they are refused at start."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

from executor.model.lora import Adapters
from executor.plugin.config import check_config
from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.fidelity.adapters import ADAPTERS
from tests.fidelity.half import ratio, too_far
from tests.fidelity.lora import Adapted
from tests.fidelity.measure import PROMPTS
from tests.gpu.conftest import deployed
from tests.gpu.test_bfloat16 import apart

# ‖a - b‖ / ‖b‖ of logits in bfloat16 against float32 with the same adapter, and over that with another.
LARGEST, TIMES = 0.06, 3


def test_each_request_has_its_own_adapter(runner: str, tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, "llama", 1, "bfloat16")
    source = "hidden = model.model.layers[1].output[0].save()\nlogits = model.logits.output.save()"
    rans = adapted.engine.run_traces([[Block(PROMPTS[0], source, lora=lora)] for lora in adapted.requests])
    assert [ran.failure for ran in rans] == [None] * len(rans)
    for i, ran in enumerate(rans):
        errors = [apart(ran.saved["logits"], truth.raw.logits[0]) for truth in adapted.truth]
        assert errors[i] <= LARGEST
        assert all(TIMES * errors[i] < error for other, error in enumerate(errors) if other != i)
    adapted.engine.close()


def test_every_location_is_as_near_as_in_transformers(runner: str, tmp_path: Path) -> None:
    """Of the model without an adapter, and of the merged weights of each, all of them in one batch."""
    adapted = Adapted(tmp_path, "llama", 1, "bfloat16")
    halves = adapted.halves()
    assert too_far(halves) == []
    print(f"llama with adapters in bfloat16: at most {ratio(halves):.2f} times as far off as transformers")
    adapted.engine.close()


def test_loops_in_graphs_use_each_request_s_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests with other adapters and with none; vLLM's kernels of adapters add in any order, so no bits are equal."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    adapted = Adapted(tmp_path, "llama", 1, "bfloat16")
    adapters = Adapters({name: str(tmp_path / name) for name in ADAPTERS})
    graphs = LocalEngine(tmp_path / "base", graphs=True, **adapters.options({}), **deployed("bfloat16"))  # type: ignore[arg-type]
    steps = "for step in tracer.iter[:]:\n    h = model.model.layers[1].output[0]\n    {}\n    kept.append(h.save())"
    source = f"kept = [].save()\n{steps}"
    try:
        for change in ("h[:] += 0.5", "h[:] = torch.tanh(h)"):
            text = source.format(change)
            traces = [
                [Block(PROMPTS[0], text, {"max_tokens": 24, "ignore_eos": True}, lora=lora)]
                for lora in adapted.requests
            ]
            for one, other in zip(adapted.engine.run_traces(traces), graphs.run_traces(traces), strict=True):
                assert one.failure is None and other.failure is None, (one.failure, other.failure)
                same = next(
                    (i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), 23
                )
                assert same >= 2
                for mine, theirs in zip(one.saved["kept"][: same + 1], other.saved["kept"], strict=False):
                    assert apart(mine, theirs.float()) < LARGEST
        counts = graphs.worker.model_runner.graphs.dispatcher.counts
        print(counts)
        assert counts.captured > 0 and counts.failed == counts.mismatched == 0
        assert counts.steps["in a captured graph"] > 24
    finally:
        graphs.close()
        adapted.engine.close()


def test_float32_is_refused_at_start(tmp_path: Path) -> None:
    model = str(write_demo_model(tmp_path / "llama", "llama"))
    with pytest.raises(ValueError, match=r"lora_dtype .* dtype bfloat16 or float16"):
        check_config(EngineArgs(model=model, enable_lora=True, dtype="float32").create_engine_config())
    check_config(EngineArgs(model=model, enable_lora=True, dtype="bfloat16").create_engine_config())
