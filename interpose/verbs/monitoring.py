"""A probe reads each new token; its alarm ends the generation. (Goldowsky-Dill et al., 2025)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.verbs.finding import Finding
from interpose.verbs.tokens import Prompt, as_array, encode, layer_of, texts, vector_of


@dataclass(frozen=True, eq=False, repr=False)
class Monitoring(Finding):
    """What the monitor saw.

    Size: two generations are compared by all that was read in them.

    Attributes:
        prompt: the token ids of the prompt.
        prompt_tokens: their texts.
        ids: the generated token ids, [steps].
        tokens: their texts.
        readings: float64 [steps], the projection on the direction before each token.
        entropies: float64 [steps], of what each token was drawn from, in nats.
        arrived: int64 [outputs], how many readings had arrived with each output.
        direction: float32 [width].
        layer: the layer after which the probe reads.
        alarm: the reading that is exceeded for an alarm; None: no alarm.
        stopped: whether an alarm ended the generation; the last reading is then the alarm's.
    """

    PICTURE = "monitor"

    prompt: list[int]
    prompt_tokens: tuple[str, ...]
    ids: list[int]
    tokens: tuple[str, ...]
    readings: np.ndarray
    entropies: np.ndarray
    arrived: np.ndarray
    direction: np.ndarray
    layer: int
    alarm: float | None
    stopped: bool


def monitor(
    model: Any,
    prompt: Prompt,
    direction: Any,
    *,
    layer: int | None = None,
    alarm: float | None = None,
    max_tokens: int = 32,
    ignore_eos: bool = False,
) -> Monitoring:
    """Generate, read a direction at each token, and stop at the first reading above the alarm.

    Leaving the stream of outputs at the alarm cancels the trace, which ends the generation in the engine.

    Args:
        model: a served model.
        prompt: a text, or token ids.
        direction: a vector [width], e.g. of `difference_of_means`.
        layer: the layer after which the stream is read; None: the layer in the middle.
        alarm: what a reading must exceed to stop the generation; None: it goes on to its end.
        max_tokens: how many tokens are generated at most.
        ignore_eos: whether the generation goes on after the end of the text.

    Raises:
        InvalidArgument: the direction is no vector of finite numbers.
    """
    vector, at, ids = vector_of(direction), layer_of(model, layer), encode(model, prompt)
    with model.trace(ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, stream=True) as tracer:
        import torch

        readings = [].save()
        for _step in tracer.iter[:]:
            stream = model.blocks[at].resid_post[-1].float()
            reading = float(stream @ torch.as_tensor(vector, device=stream.device))
            logprobs = model.logits.output[0].float().log_softmax(-1)
            readings.append((reading, float(-(logprobs.exp() * logprobs).sum())))

    generated: list[int] = []
    seen: list[Any] = []
    arrived: list[int] = []
    stopped = False
    with tracer.stream() as outputs:
        for output in outputs:
            generated, seen = list(output.token_ids), list(output.saves["readings"])
            arrived.append(len(seen))
            over = [step for step, (reading, _) in enumerate(seen) if alarm is not None and reading > alarm]
            if over:
                generated, seen, stopped = generated[: over[0] + 1], seen[: over[0] + 1], True
                break  # leaving it cancels the trace
    values = as_array(seen[: len(generated)]).reshape(-1, 2)
    return Monitoring(
        ids, texts(model, ids), generated, texts(model, generated), values[:, 0], values[:, 1],
        np.array(arrived), vector, at, alarm, stopped,
    )  # fmt: skip
