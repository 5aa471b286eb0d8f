"""One in-process engine of another library that runs code inside vLLM's forward pass.

`python -m benchmarks.peer_child nnsight|nnsight-taps|vllm-lens CHECKPOINT [OPTIONS]`. OPTIONS are further options of vLLM's LLM,
as JSON. Each library is used as its own documents and benchmarks use it. The work is that of `benchmarks.blocks`: the same
layers, the same steps. vllm-lens captures the sum of hidden and residual, and steers by a vector of its own type.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.engine_child import CORES
from benchmarks.rounds import answer_forever

LAYER = 4  # the layer that is captured or steered, as in `benchmarks.blocks`
KINDS = ("nnsight", "nnsight-taps", "vllm-lens")

# Runs a batch: prompts of token ids, options of the sampling, the work's name, the number of requests that have it.
# Returns how many values came back.
Batch = Callable[[list[list[int]], dict[str, Any], str, int], int]


def main(kind: str, checkpoint: str, given: str = "{}") -> None:
    """Load the library's engine, and answer requests for timed batches."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # both libraries ask for the first model runner
    if kind != "vllm-lens":
        os.environ["VLLM_PLUGINS"] = "none"  # vllm-lens registers itself in every vLLM where it is installed
    if kind == "nnsight-taps":
        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"  # nnsight sets it too late for an engine in the same process
    options = json.loads(given)
    batch = {"nnsight": nnsight, "nnsight-taps": nnsight_taps, "vllm-lens": vllm_lens}[kind](checkpoint, options)
    import torch

    if torch.cuda.is_available():
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-CORES:])

    def generate(batch_size: int, prompt_tokens: int, tokens: int, work: str = "", traced: int = 0) -> float | str:
        """Return the seconds of a batch with all its values, or why they do not count."""
        prompts = [[(7 * i + 3 * j) % 400 + 5 for j in range(prompt_tokens)] for i in range(batch_size)]
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        traced = traced if work else 0
        began = time.perf_counter()
        came = batch(prompts, sampling, work, traced)
        took = time.perf_counter() - began
        layers = _layers(checkpoint) if work.startswith("capture all") else 1
        expected = tokens * layers * traced if work.startswith("capture") else 0
        if came != expected:
            return f"{came} values came instead of {expected}"
        return took

    answer_forever(lambda batch, **request: generate(batch, **request))


def _layers(checkpoint: str) -> int:
    with open(os.path.join(checkpoint, "config.json")) as file:
        return int(json.load(file)["num_hidden_layers"])


def nnsight(checkpoint: str, options: dict[str, Any]) -> Batch:
    """Return what runs batches on nnsight's eager engine."""
    return _nnsight(checkpoint, {name: value for name, value in options.items() if name != "enforce_eager"})


def nnsight_taps(checkpoint: str, options: dict[str, Any]) -> Batch:
    """Return what runs batches on nnsight's engine with CUDA graphs and declared taps."""
    options = {name: value for name, value in options.items() if name != "enforce_eager"}
    return _nnsight(checkpoint, {**options, "taps": ["model.layers.*.output"]})


def _nnsight(checkpoint: str, options: dict[str, Any]) -> Batch:
    import torch
    from nnsight.modeling.vllm import VLLM

    model = VLLM(checkpoint, dispatch=True, **options)
    layers = _layers(checkpoint)
    config = model.vllm_entrypoint.llm_engine.model_config
    vector = torch.full((config.get_hidden_size(),), 0.01, dtype=config.dtype)
    if torch.cuda.is_available():
        vector = vector.cuda()

    # A `with` block of nnsight is read from this file's source, so each work has a function of its own.
    def plain(prompts: list[list[int]], sampling: dict[str, Any], traced: int) -> int:
        with model.trace(**sampling) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    pass
        return 0

    def capture_one(prompts: list[list[int]], sampling: dict[str, Any], traced: int) -> int:
        with model.trace(**sampling) as tracer:
            kept = [].save()  # type: ignore[attr-defined]
            for prompt in prompts[:traced]:
                with tracer.invoke(prompt):
                    for _step in tracer.iter[:]:
                        kept.append(model.model.layers[LAYER].output[0].clone())
            for prompt in prompts[traced:]:
                with tracer.invoke(prompt):
                    pass
        return len(kept)

    def capture_all(prompts: list[list[int]], sampling: dict[str, Any], traced: int) -> int:
        with model.trace(**sampling) as tracer:
            kept = [].save()  # type: ignore[attr-defined]
            for prompt in prompts[:traced]:
                with tracer.invoke(prompt):
                    for _step in tracer.iter[:]:
                        for layer in range(layers):
                            kept.append(model.model.layers[layer].output[0].clone())
        return len(kept)

    def steer(prompts: list[list[int]], sampling: dict[str, Any], traced: int) -> int:
        with model.trace(**sampling) as tracer:
            for prompt in prompts[:traced]:
                with tracer.invoke(prompt):
                    for _step in tracer.iter[:]:
                        model.model.layers[LAYER].output[0][:] += vector
        return 0

    works = {
        "": plain,
        "capture one layer, all steps": capture_one,
        "capture all layers, all steps": capture_all,
        "steer one layer, all steps": steer,
    }
    return lambda prompts, sampling, work, traced: works[work](prompts, sampling, traced)


def vllm_lens(checkpoint: str, options: dict[str, Any]) -> Batch:
    """Return what runs batches on vLLM with vllm-lens, which is eager."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm_lens import SteeringVector

    llm = LLM(model=checkpoint, **options)
    layers = list(range(_layers(checkpoint)))
    hidden = llm.llm_engine.model_config.get_hidden_size()
    vector = SteeringVector(activations=torch.full((1, hidden), 0.01), layer_indices=[LAYER])
    works: dict[str, dict[str, Any]] = {
        "": {},
        "capture one layer, all steps": {"output_residual_stream": [LAYER]},
        "capture all layers, all steps": {"output_residual_stream": layers},
        "steer one layer, all steps": {"apply_steering_vectors": [vector]},
    }

    def batch(prompts: list[list[int]], sampling: dict[str, Any], work: str, traced: int) -> int:
        params = [
            SamplingParams(**sampling, extra_args=dict(works[work]) if i < traced else {}) for i in range(len(prompts))
        ]
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: Any = llm.generate(given, params, use_tqdm=False)
        if not work.startswith("capture"):
            return 0
        came = 0
        for output, prompt in zip(outputs[:traced], prompts, strict=False):
            # [layers, prompt and generated tokens, hidden]; the last token's own pass is not run.
            captured = output.activations["residual_stream"]
            came += captured.shape[0] * (captured.shape[1] - len(prompt) + 1)
        return came

    return batch


if __name__ == "__main__":
    main(*sys.argv[1:])
