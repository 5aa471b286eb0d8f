"""Monitoring a stream: a probe reads every new token, and its alarm ends the generation.

    python examples/stream_monitor.py --address localhost:9000

The probe is a direction, the difference of the mean activations over two sets of prompts. In every step of the generation
the block projects the residual stream at the newest token on it and takes the entropy of what the next token is drawn from;
two numbers travel with each output. A second run, with an alarm, is left at the first token that raises it, which ends it in
the engine too. (Probes as monitors: Goldowsky-Dill et al., 2025)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import pictures

TOWARDS = ["The water is cold and", "The night is dark and", "The fox runs into the"]
AWAY = ["The capital of Spain is", "One, two, three,", "Paris is in"]
PROMPT = "Once upon a time there was"
DEPTH = 0.5  # of the layer that the probe reads; 1: after the last
STEPS = 32
QUANTILE = 0.9  # of the readings without an alarm: what raises it


@dataclass(frozen=True)
class Watch:
    """What the monitor saw.

    Attributes:
        direction: [hidden].
        tokens: generated, [steps].
        readings: [steps], the projection on the direction before each of them.
        entropies: [steps], of what each was drawn from, in nats.
        arrived: [steps], how many readings were here with each output.
        alarm: what raises it.
        stopped: how many tokens the run with an alarm had given when it was left.
        layer: after which the probe reads.
        prompt: what the model went on with.
    """

    direction: np.ndarray
    tokens: list[int]
    readings: np.ndarray
    entropies: np.ndarray
    arrived: list[int]
    alarm: float
    stopped: int
    layer: int
    prompt: str = PROMPT


def probe_of(model: Any, layer: int) -> Any:
    """Return the direction that the monitor looks along, [hidden], of length 1."""
    direction = experiment.difference_of_means(model, layer, TOWARDS, AWAY)
    return direction / direction.norm()


def watched(model: Any, prompt: str, layer: int, direction: Any) -> Any:
    """Begin a generation whose block takes two readings in each step; return its outputs."""
    with model.trace(prompt, max_tokens=STEPS, temperature=0.0, ignore_eos=True, stream=True) as tracer:
        readings = [].save()
        for _step in tracer.iter[:]:
            reading = float(model.blocks[layer].resid_post[-1].float() @ direction)
            logprobs = model.logits.output[0].float().log_softmax(-1)
            readings.append((reading, float(-(logprobs.exp() * logprobs).sum())))
    return tracer.stream()


def run(model: Any, prompt: str = PROMPT) -> Watch:
    """Watch a generation to its end, then one with an alarm."""
    layer = experiment.layer_at(model, DEPTH)
    direction = probe_of(model, layer)
    arrived: list[int] = []
    for output in watched(model, prompt, layer, direction):
        tokens, readings = output.token_ids, list(output.saves["readings"])
        arrived.append(len(readings))
    alarm = float(np.quantile([reading for reading, _ in readings], QUANTILE))
    stopped = 0
    with watched(model, prompt, layer, direction) as outputs:
        for output in outputs:
            stopped = len(output.token_ids)
            if output.saves["readings"][-1][0] > alarm:
                break  # leaving it cancels the trace
    values = experiment.as_array(readings)
    return Watch(
        experiment.as_array(direction), tokens, values[:, 0], values[:, 1], arrived, alarm, stopped, layer, prompt
    )


def draw(model: Any, found: Watch, picture: Path) -> None:
    """Write both readings over the tokens, and where the alarm ended the second run."""
    labels = experiment.labels_of(model, found.tokens)
    figure = pictures.figure(11, 6)
    probe, entropy = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
    steps = np.arange(len(found.tokens))
    over = found.readings > found.alarm
    probe.plot(steps, found.readings, color="tab:blue", marker="o", markersize=4)
    probe.plot(steps[over], found.readings[over], "o", color="tab:red", label="over it")
    probe.axhline(found.alarm, color="tab:red", linestyle="--", linewidth=1, label="alarm")
    probe.axvspan(found.stopped - 0.5, len(labels) - 0.5, color="0.9", label="never generated with the alarm on")
    probe.set_xlim(-0.5, len(labels) - 0.5)
    probe.set_ylabel("projection on the probe")
    probe.set_title(f"“{found.prompt} …”: what the monitor reads at each token", loc="left", fontsize=11)
    probe.margins(y=0.2)
    probe.legend(loc="upper left", ncols=3)
    entropy.bar(steps, found.entropies, color="tab:gray")
    entropy.set_ylabel("entropy (nats)")
    entropy.set_xticks(steps, labels, rotation=90, family="monospace", fontsize=8)
    caption = f"Residual stream after layer {found.layer} at the newest token, and what the next token is drawn from."
    pictures.save(figure, caption, picture)


if __name__ == "__main__":
    experiment.main(__doc__, run, draw, "stream_monitor.png", {"prompt": PROMPT})
