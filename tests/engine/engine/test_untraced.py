"""An engine with an option that contradicts traces serves plain requests, and refuses traces as they come, with the reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from executor.engine import startup
from executor.engine.engine import TraceEngine
from executor.engine.failures import TraceFailed
from executor.engine.options import engine_options
from interpose.cli.demo_model import Shape, write_demo_model
from interpose.v1 import trace_pb2 as pb
from serve_app.settings_model import ModelSettings
from tests.engine.harness import request_of
from tests.engine.kept import KEPT
from tests.oracle import Oracle

PROMPT = [5, 400, 17, 99, 256, 31, 8]
TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(layers=2, hidden=128, context=256)
    return write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", shape)


@pytest.fixture
async def engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TraceEngine]:
    """An engine as a replica starts it, but for Ray, which places no workers here; a model of its own guesses its tokens."""

    def here(model: Any) -> dict[str, Any]:
        options = engine_options(model)
        del options["distributed_executor_backend"]
        return options

    monkeypatch.setattr(startup, "engine_options", here)
    monkeypatch.setenv("INTERPOSE_ENGINE_VERDICTS", "")  # is set by `Verdicts`, and goes with the patch
    guessing = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 2}
    options = {"dtype": "float32", "max_model_len": 128, "speculative_config": guessing}
    KEPT.make_way()
    engine = await TraceEngine.start(ModelSettings(name="m", model=str(checkpoint), engine=options))
    yield engine
    await engine.shutdown()


@pytest.mark.timeout(300)
async def test_plain_requests_are_served_and_traces_refused(engine: TraceEngine, checkpoint: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    asked = pb.OpenAIRequest(path="/v1/completions", body=json.dumps(body).encode())
    events = [pb.Event.FromString(data) async for data in engine.run(request_of(pb.Trace(id="plain", openai=asked)))]
    parts = [one for event in events for one in (event.bundle.events if event.HasField("bundle") else (event,))]
    [answer] = [part.http for part in parts if part.HasField("http")]
    assert answer.status == 200, answer.data
    said = json.loads(answer.data)
    assert said["choices"][0]["token_ids"] == Oracle(checkpoint).run(PROMPT, TOKENS).tokens

    program = pb.Program(source="h = model.logits.output.save()\n", filename="<block>", first_line=1)
    invoke = pb.Invoke(program=program)
    invoke.prompt.token_ids.ids.extend(PROMPT)
    for trace in (
        pb.Trace(id="traced", invokes=[invoke]),
        pb.Trace(id="scanned", invokes=[invoke], scan=True),
        pb.Trace(id="edited", openai=pb.OpenAIRequest(path=asked.path, body=asked.body, traced=True)),
    ):
        with pytest.raises(TraceFailed, match="served without traces: speculative_config .* a model of its own"):
            async for _ in engine.run(request_of(trace)):
                pass
    assert await engine.idle() and await engine.counters() == {}
    modules = engine.describe().modules
    assert {one.path for one in modules} > {"model.layers.1.mlp", "lm_head"}
    for one in modules:
        assert "speculative_config" in one.output_refused and one.input_refused == one.not_applied == one.output_refused
