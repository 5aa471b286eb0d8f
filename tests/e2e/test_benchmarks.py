"""The traces that `python -m benchmarks tensor_parallel` times, each once, and that they save what they say."""

from __future__ import annotations

from benchmarks.tensor_parallel import TRACES, Traces
from interpose.cli.demo_model import Shape
from tests.e2e.service import RunningService

PROMPT, TOKENS = 16, 3


def test_the_traces_save_what_is_counted(service: RunningService) -> None:
    with Traces(service.address, 4, "llama") as traces:
        for name in TRACES:
            assert traces.ask(trace=name, prompt_tokens=PROMPT, tokens=TOKENS, pause=0.0, numbers=5000) > 0
    shape = Shape()
    row = shape.hidden * 4
    steps = PROMPT + TOKENS - 1
    assert traces.saved == {
        "nothing": 0,
        "one save": PROMPT * row,
        "one layer in each step": steps * row,
        "all layers in each step": steps * shape.layers * row,
        "steering": 0,
        "all layers": PROMPT * shape.layers * row,
        "all layers, left": PROMPT * shape.layers * row,
        "MLP": PROMPT * shape.layers * 2 * row,  # twice as wide
        "tensor": 5000 * 4,
    }
