"""The finished output of one request, as `tracer.result` gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from interpose.contract.idioms import OF_RESULTS


@dataclass
class Logprob:
    """How likely one token was at one place.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: its place among all tokens, from 1; None: unknown.
        decoded_token: its text; None: unknown.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class Result:
    """What the engine generated for one invoke.

    Attributes:
        text: the generated text, without the prompt.
        token_ids: the generated ids.
        finish_reason: "stop", "length", "tracer_stop" or "abort"; "" while the request runs.
        prompt_token_ids: the prompt's ids.
        logprobs: for each generated token, the likeliest tokens and itself by id; None unless `logprobs=k` was asked for.
        prompt_logprobs: the same for the prompt's tokens, of which the first has None; None unless `prompt_logprobs=k`.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def __getattr__(self, name: str) -> NoReturn:
        hint = f": {OF_RESULTS[name]}" if name in OF_RESULTS else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Result:
        """Return the result of which `dataclasses.asdict` gave `fields`."""
        known = dict(fields)
        for name in ("logprobs", "prompt_logprobs"):
            if known.get(name) is not None:
                known[name] = [place and {int(i): Logprob(**one) for i, one in place.items()} for place in known[name]]
        return cls(**known)
