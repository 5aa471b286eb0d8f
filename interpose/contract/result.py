"""The finished output of one request, as `tracer.result` gives it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from interpose.contract.display import MOST_SHOWN, escaped, folded, shortened, table
from interpose.contract.idioms import OF_RESULTS

_MOST_IDS = 20  # token ids in a printed result


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


@dataclass(repr=False)
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

    def __repr__(self) -> str:
        fields = [f"text={self.text!r}", f"token_ids={shortened(self.token_ids, _MOST_IDS)}"]
        fields.append(f"finish_reason={self.finish_reason!r}")
        fields.append(f"prompt_token_ids={shortened(self.prompt_token_ids, _MOST_IDS)}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                fields.append(f"{name}=<of {len(getattr(self, name))} tokens>")
        return f"{type(self).__name__}({', '.join(fields)})"

    def _repr_html_(self) -> str:
        prompt = f"{len(self.prompt_token_ids)} tokens of the prompt"
        ended = f"{len(self.token_ids)} tokens, {escaped(self.finish_reason or 'running')}"
        made = [f'<div style="white-space: pre-wrap">{escaped(self.text)}</div>', f"<p>{ended}; {prompt}</p>"]
        if self.logprobs is not None:
            made.append(folded("tokens", _probabilities(self.token_ids, self.logprobs), opened=True))
        if self.prompt_logprobs is not None:
            made.append(folded("tokens of the prompt", _probabilities(self.prompt_token_ids, self.prompt_logprobs)))
        return "".join(made)

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


def _probabilities(tokens: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None]) -> str:
    """Return a table of tokens, their probabilities, and the most likely tokens instead."""
    rows = []
    for token, position in list(zip(tokens, logprobs, strict=False))[:MOST_SHOWN]:
        one = (position or {}).get(token)
        others = sorted(
            (other for other in (position or {}).items() if other[0] != token), key=lambda kv: -kv[1].logprob
        )
        rows.append(
            (
                f"<code>{escaped(_text(token, one))}</code>",
                str(token),
                _percent(one),
                "" if one is None or one.rank is None else str(one.rank),
                ", ".join(f"<code>{escaped(_text(*other))}</code> {_percent(other[1])}" for other in others),
            )
        )
    rest = f"<p>… {len(tokens) - MOST_SHOWN} more</p>" if len(tokens) > MOST_SHOWN else ""
    return table(("token", "id", "probability", "rank", "others"), rows) + rest


def _text(token: int, one: Logprob | None) -> str:
    return repr(one.decoded_token) if one is not None and one.decoded_token is not None else str(token)


def _percent(one: Logprob | None) -> str:
    return "" if one is None else f"{100 * math.exp(min(one.logprob, 0.0)):.1f} %"
