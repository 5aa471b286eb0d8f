"""The finished output of one request, as `tracer.result` gives it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Result:
    """What the engine generated for one invoke.

    Attributes:
        text: the generated text, without the prompt.
        token_ids: the generated ids.
        finish_reason: "stop", "length", "tracer_stop" or "abort"; "" while the request runs.
        prompt_token_ids: the prompt's ids.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
