"""The finished output of one request, as `tracer.result` gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from interpose.contract.idioms import OF_RESULTS


@dataclass
class Logprob:
    """The probability of a token at a position.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: rank of the token among all tokens, from 1; None: unknown.
        decoded_token: the token's text; None: unknown.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class Result:
    """The engine's output for one invoke.

    Attributes:
        text: the generated text, without the prompt.
        token_ids: the generated ids.
        finish_reason: "stop", "length", "tracer_stop" or "abort"; "" while the request runs.
        prompt_token_ids: the prompt's ids.
        logprobs: for each generated token, a dict by id with this token and the k most likely tokens. None without the
            sampling parameter `logprobs=k`.
        prompt_logprobs: the same for each token of the prompt; the entry of the first token is None. None without the sampling
            parameter `prompt_logprobs=k`.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {OF_RESULTS[name]}" if name in OF_RESULTS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def to_plain(self) -> dict[str, Any]:
        """Return the fields as lists, dicts, text and numbers; the lists are the result's own."""
        plain = dict(vars(self))
        for name in ("logprobs", "prompt_logprobs"):
            if plain[name] is not None:
                plain[name] = [
                    position and {i: dict(vars(one)) for i, one in position.items()} for position in plain[name]
                ]
        return plain

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Result:
        """Return a result from what `to_plain` gave."""
        known = dict(fields)
        for name in ("logprobs", "prompt_logprobs"):
            if known.get(name) is not None:
                known[name] = [
                    position and {int(i): Logprob(**one) for i, one in position.items()} for position in known[name]
                ]
        return cls(**known)
