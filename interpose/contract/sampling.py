"""The client's check of sampling parameters: names, counts, and structured outputs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from interpose.contract.errors import InvalidArgument, did_you_mean
from interpose.contract.idioms import OF_TRACES

_NO_CHANCE = 1e-5  # at a lower temperature the engine samples greedily

_COMMON = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "min_tokens", "ignore_eos", "logprobs")

# The constraints of structured outputs: for each the accepted types, and their description for the message.
_CONSTRAINTS: dict[str, tuple[tuple[type, ...], str]] = {
    "json": ((str, dict), "a JSON schema as a dict or a string"),
    "regex": ((str,), "a regular expression"),
    "choice": ((list, tuple), "a list of strings"),
    "grammar": ((str,), "a grammar in EBNF"),
    "json_object": ((bool,), "True"),
    "structural_tag": ((str,), "a structural tag as JSON"),
}
_OPTIONS: dict[str, tuple[tuple[type, ...], str]] = {
    "disable_any_whitespace": ((bool,), "True or False"),
    "disable_additional_properties": ((bool,), "True or False"),
    "whitespace_pattern": ((str,), "a regular expression"),
}


def check_sampling(sampling: Mapping[str, object], known: Sequence[str]) -> dict[str, object]:
    """Return the sampling parameters after a check.

    Args:
        sampling: the parameters by name.
        known: the names of the engine's parameters; empty: unknown.

    Raises:
        InvalidArgument: the engine has no such parameter (the error suggests similar names), or `structured_outputs` is not
            valid.
    """
    for name in sampling:
        if not known or name in known or name == "n":
            continue
        if name == "max_new_tokens":
            raise InvalidArgument(
                "max_new_tokens belongs to model.generate(…); here it is max_tokens", suggestions=["max_tokens"]
            )
        if name in OF_TRACES:
            raise InvalidArgument(f"{name!r} is no sampling parameter: {OF_TRACES[name]}")
        near = difflib.get_close_matches(name, known, n=3)
        common = ", ".join(one for one in _COMMON if one in known) or "those of vLLM"
        hint = did_you_mean(near) if near else f"it has {common} … as vLLM's SamplingParams lists them"
        raise InvalidArgument(f"the engine has no sampling parameter {name!r}; {hint}", suggestions=near)
    count = sampling.get("n", 1)
    if type(count) is not int or count < 1:
        raise InvalidArgument(f"n is the number of sequences, 1 or more, not {count!r}")
    structured = sampling.get("structured_outputs")
    if structured is not None:
        try:
            check_structured_outputs(structured)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
    return dict(sampling)


def check_adapter(name: object, adapters: Sequence[str]) -> str:
    """Return the name of a LoRA adapter for a message, "" for None.

    Args:
        name: the user's argument; None: no adapter.
        adapters: the names of the engine's adapters.

    Raises:
        InvalidArgument: there is no such adapter; the error suggests similar names.
    """
    if name is None or (isinstance(name, str) and name in adapters):
        return str(name or "")
    if not adapters:
        raise InvalidArgument("this service has no LoRA adapters: the engine runs traces on the model's own weights")
    near = difflib.get_close_matches(str(name), adapters, n=3)
    hint = did_you_mean(near) if near else f"it has {', '.join(adapters)}"
    raise InvalidArgument(f"there is no LoRA adapter {name!r:.80}; {hint}", suggestions=near)


def sequences(trace: Mapping[str, object], own: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the prompt's own sampling parameters for each of its `n` sequences.

    A seed is increased by 1 from each sequence to the next.

    Args:
        trace: the trace's sampling parameters.
        own: the prompt's own sampling parameters, which override the trace's.

    Raises:
        InvalidArgument: several sequences are sampled greedily, so they would be equal.
    """
    both = {**trace, **own}
    count, temperature, seed = both.get("n", 1), both.get("temperature"), both.get("seed")
    assert isinstance(count, int)
    rest = {name: value for name, value in own.items() if name != "n"}
    if count == 1:
        return [rest]
    if isinstance(temperature, int | float) and temperature < _NO_CHANCE:
        raise InvalidArgument(f"n={count} sequences with temperature={temperature} are all the same; leave n out")
    if type(seed) is not int:
        return [dict(rest) for _ in range(count)]
    return [{**rest, "seed": seed + number} for number in range(count)]


def check_structured_outputs(structured: Any) -> None:
    """Check that structured outputs are a dict with one constraint and known options.

    Raises:
        ValueError: they are not.
    """
    if not isinstance(structured, Mapping):
        example = '{"choice": ["yes", "no"]}'
        raise ValueError(f"structured_outputs is a dict with one constraint, e.g. {example}, not {structured!r:.80}")
    for name, value in dict(structured).items():
        kinds, what = (_CONSTRAINTS | _OPTIONS).get(name, ((), ""))
        if not what:
            near = difflib.get_close_matches(str(name), [*_CONSTRAINTS, *_OPTIONS], n=2)
            hint = did_you_mean(near) if near else f"it has {', '.join([*_CONSTRAINTS, *_OPTIONS])}"
            raise ValueError(f"structured_outputs has no {name!r}; {hint}")
        items: Any = value if isinstance(value, list | tuple) else ()
        if not isinstance(value, kinds) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"structured_outputs[{name!r}] is {what}, not {value!r:.80}")
    given = [name for name in structured if name in _CONSTRAINTS]
    if len(given) != 1:
        raise ValueError(f"structured_outputs takes one of {', '.join(_CONSTRAINTS)}; here are {len(given)}")


def expected_tokens(trace: Mapping[str, object], invokes: Sequence[Mapping[str, object]]) -> int | None:
    """Return the most tokens that a trace generates, None if a `max_tokens` is not a number."""
    total = 0
    for own in invokes:
        count = {**trace, **own}.get("max_tokens", 1)
        if not isinstance(count, int):
            return None
        total += count
    return total
