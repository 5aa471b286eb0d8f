"""Sampling parameters of an invoke as vLLM takes them, judged by vLLM before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from interpose.sampling import check_structured_outputs


def checked(sampling: Mapping[str, Any], config: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams.

    Args:
        sampling: parameters by vLLM's names; `structured_outputs` is a dict of one constraint (json, regex, choice, grammar,
            json_object or structural_tag) and its options.
        config: the engine's VllmConfig.
        tokenizer: the model's.

    Raises:
        ValueError: vLLM would refuse them, with its reason.
    """
    made = dict(sampling)
    structured = made.get("structured_outputs")
    try:
        if structured is not None:
            check_structured_outputs(structured)
            made["structured_outputs"] = StructuredOutputsParams(**structured)
        # vLLM notes in the parameters which backend it chose; each request gets parameters of its own.
        SamplingParams(**copy.deepcopy(made)).verify(
            config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer
        )
    except (ValueError, TypeError):
        raise
    except Exception as error:
        raise ValueError(str(error)) from None
    return made
