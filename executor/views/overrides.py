"""Facts that an architecture declares, where a probe run cannot show them exactly.

A declared fact is believed only if it agrees with the probe run: a multiplier that is not what the probe run estimates, to one
part in a thousand, is not used, and the value is refused as without it. The keys are the names of vLLM's model classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """What an architecture declares.

    Attributes:
        multiplier: from the model's configuration, the number that the layers multiply attention's and MLP's outputs with before
            they add them to the stream. An architecture whose configuration has the number itself needs no such fact.
    """

    multiplier: Callable[[Any], float] | None = None


def _by_depth(config: Any) -> float:
    return float(config.scale_depth / math.sqrt(config.num_hidden_layers))


OVERRIDES = {
    "MiniCPMForCausalLM": Facts(multiplier=_by_depth),
    "MiniCPM3ForCausalLM": Facts(multiplier=_by_depth),
}


def numbers_of(architecture: str, config: Any) -> list[float]:
    """Return the numbers that a layer's multipliers can be.

    They are the floating-point numbers of the configuration, and the declared number.

    Args:
        architecture: the name of vLLM's model class.
        config: the model's configuration.
    """
    numbers = [one for one in vars(config).values() if isinstance(one, float)]
    facts = OVERRIDES.get(architecture, Facts())
    return numbers if facts.multiplier is None else [*numbers, facts.multiplier(config)]
