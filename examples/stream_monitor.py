"""Monitoring a stream: a probe reads every new token, and its alarm ends the generation.

    python examples/stream_monitor.py --address localhost:9000

The probe is a direction, the difference of the mean activations over two sets of prompts. In every step of the generation
the block projects the residual stream at the newest token on it and takes the entropy of what the next token is drawn from;
two numbers travel with each output. A second run, with an alarm, is left at the first token that raises it, which ends it in
the engine too. (Probes as monitors: Goldowsky-Dill et al., 2025)
"""

from __future__ import annotations

from typing import Any

import experiment
import numpy as np

from interpose import plots, verbs

TOWARDS = ["The water is cold and", "The night is dark and", "The fox runs into the"]
AWAY = ["The capital of Spain is", "One, two, three,", "Paris is in"]
PROMPT = "Once upon a time there was"
DEPTH = 0.5  # of the layer that the probe reads; 1: after the last
STEPS = 32
QUANTILE = 0.9  # of the readings without an alarm: what raises it


def run(model: Any, prompt: str = PROMPT) -> tuple[verbs.Monitoring, verbs.Monitoring]:
    """Watch a generation to its end, then one with an alarm."""
    layer = verbs.layer_at(model, DEPTH)
    direction = verbs.difference_of_means(model, TOWARDS, AWAY, layer=layer)
    how: Any = {"layer": layer, "max_tokens": STEPS, "ignore_eos": True}
    watched = verbs.monitor(model, prompt, direction / np.linalg.norm(direction), **how)
    alarm = float(np.quantile(watched.readings, QUANTILE))
    return watched, verbs.monitor(model, prompt, watched.direction, alarm=alarm, **how)


def draw(found: tuple[verbs.Monitoring, verbs.Monitoring], picture: Any) -> None:
    """Write both readings over the tokens, and where the alarm ended the second run."""
    watched, stopped = found
    plots.monitor(watched, picture, stopped=stopped)


if __name__ == "__main__":
    experiment.main(__doc__, run, "stream_monitor.png", {"prompt": PROMPT}, draw=draw)
