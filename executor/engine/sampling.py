"""Sampling parameters of an invoke for vLLM; vLLM judges them before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from interpose.contract.sampling import check_structured_outputs

_MAX_PARTS = 1_000_000  # of all parameters together: biases for every token of a large vocabulary have fewer parts
_MAX_CHARACTERS = 1 << 20


def checked(sampling: Mapping[str, Any], config: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams.

    Args:
        sampling: parameters by vLLM's names. `structured_outputs` is a dict of one constraint (json, regex, choice, grammar,
            json_object or structural_tag) and its options.
        config: the engine's VllmConfig.
        tokenizer: the model's tokenizer.

    Raises:
        ValueError: vLLM would refuse the parameters, with its reason.
    """
    _check_size(sampling)
    made = {name: value.item() if isinstance(value, np.generic) else value for name, value in sampling.items()}
    structured, repetition = made.get("structured_outputs"), made.get("repetition_detection")
    try:
        if isinstance(repetition, Mapping):
            made["repetition_detection"] = RepetitionDetectionParams(**repetition)
        if structured is not None:
            check_structured_outputs(structured)
            made["structured_outputs"] = StructuredOutputsParams(**structured)
        # vLLM notes in the parameters which backend it chose, so each request gets parameters of its own.
        params = SamplingParams(**copy.deepcopy(made))
        check_types(params)
        params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer)
    except (ValueError, TypeError):
        raise
    except Exception as error:
        raise ValueError(str(error)) from None
    return made


def check_types(params: SamplingParams) -> None:
    """Refuse a value of a wrong type, for example 3.0 as a number of tokens.

    The engine's own process could not read it, and would never read anything again.
    """
    try:
        MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    except Exception as error:
        raise ValueError(f"a sampling parameter of another type than the engine's: {error}") from None


def _check_size(sampling: Mapping[str, Any]) -> None:
    """Refuse parameters that would keep the engine busy, or fill its memory.

    A list that another list holds twice counts twice.
    """
    parts = characters = 0
    todo: list[Any] = [sampling]
    while todo:
        one = todo.pop()
        parts += 1
        if isinstance(one, str | bytes):
            characters += len(one)
        elif isinstance(one, range):
            parts += len(one)
        elif isinstance(one, Mapping):
            todo.extend(one.keys())
            todo.extend(one.values())
        elif isinstance(one, list | tuple | set | frozenset):
            todo.extend(one)
        if parts + len(todo) > _MAX_PARTS or characters > _MAX_CHARACTERS:
            raise ValueError(
                f"the sampling parameters of a prompt have more than {_MAX_PARTS} parts or {_MAX_CHARACTERS} characters"
            )
