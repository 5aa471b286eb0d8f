"""Speculative decoding beside blocks: tokens are guessed for plain requests alone.

A guessed token has a row in the step that checks it, whether or not the token is accepted. A block would see the rows of
tokens that never come. So the scheduler drops the guesses for a request whose block lives, and such a request has one row
in each step of the generation. A request whose block has ended without a change is a plain request from then on.

In a step with guesses, the logits have a row for each guess too, and the sampled tokens a column. `Guesses` finds the rows and
columns that blocks may see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_METHOD = "ngram"


def why_not_guessed(config: Any, stages: int, second_runner: bool) -> str:
    """Return why tokens cannot be guessed beside blocks; "" if they can.

    Args:
        config: the engine's SpeculativeConfig; None: nothing is guessed.
        stages: the number of pipeline stages.
        second_runner: whether the engine has the V2 model runner.
    """
    if config is None:
        return ""
    if config.method != _METHOD:
        return (
            f"the method {config.method} guesses with a model of its own, which reads what blocks may have changed; "
            f'write {{"method": "{_METHOD}", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}'
        )
    if stages > 1:
        return "guesses over pipeline stages have not been shown to be right; use tensor_parallel_size"
    if second_runner:
        return "the V2 model runner checks guesses on the device, where no block sees the logits; set VLLM_USE_V2_MODEL_RUNNER=0"
    return ""


class Guesses:
    """The logits and the tokens of a step in which tokens of plain requests are checked.

    Args:
        metadata: the step's SpecDecodeMetadata; None: nothing is checked.
    """

    def __init__(self, metadata: Any) -> None:
        self._last = None if metadata is None else metadata.bonus_logits_indices.long()  # [requests]

    def shown(
        self, logits: torch.Tensor, show: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:  # [requests and guesses, vocabulary]
        """Show the last row of each request; return all rows to sample from.

        A request without guesses has no other row.

        Args:
            logits: the rows of all requests.
            show: given one row for each request, returns what to sample from.
        """
        if self._last is None:
            return show(logits)
        mine = logits[self._last]
        changed = show(mine.clone())
        if torch.equal(mine, changed):
            return logits
        logits = logits.clone()
        logits[self._last] = changed.to(logits)
        return logits

    def sampled(
        self, token_ids: torch.Tensor, show: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:  # [requests, guesses + 1]
        """Show the first token of each request; return all tokens.

        Args:
            token_ids: the tokens, of which a request without guesses has one.
            show: given one token for each request, [requests, 1], returns what was sampled.
        """
        if self._last is None or token_ids.shape[1] == 1:
            return show(token_ids)
        first = show(token_ids[:, :1].contiguous())
        return torch.cat([first, token_ids[:, 1:]], dim=1)
