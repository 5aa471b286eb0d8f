"""The account of a run: the locations that a block read and changed, and the precision."""

from __future__ import annotations

from dataclasses import dataclass, field

from interpose.v1.trace_pb2 import Accounting as AccountingMessage
from interpose.v1.value_pb2 import DType


@dataclass(frozen=True)
class Accounting:
    """The account of one invoke, also of an invoke that failed.

    Size: data: each field is a figure of the account.

    Attributes:
        served: the number of times that the block was at each location, in the order of the first times. Example:
            `served["model.layers.2.output"]`.
        written: the number of times that a change of the block at a location went into the model.
        steps: the number of steps in which the block ran; the prompt is the first step.
        prompt_tokens, generated_tokens: the numbers of tokens of the request.
        cached_tokens: how many tokens of the prompt came from the engine's prefix cache. None of them is at or behind the first
            row of the prompt for which the block may ask; 0 where that is not known.
        dtype: dtype of the activations, e.g. "bfloat16".
        kv_cache_dtype: dtype of the keys and values in the engine's cache.
        attention: the engine's attention backends, e.g. "FLASH_ATTN".
        matmul: precision of products of float32 matrices: "highest", "high" (TF32) or "medium" (bfloat16).
        tiers: the number of steps in each tier. "graph": in captured graphs, by tables; "plan": as a tensor program at the hooks;
            "block": the block's own Python; "idle": nothing of the block ran. The numbers add up to `steps`.
        reasons: why steps ran in no better tier, with the number of steps, e.g. "line 7: …".
    """

    served: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    dtype: str = ""
    kv_cache_dtype: str = ""
    attention: str = ""
    matmul: str = ""
    tiers: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0

    @classmethod
    def of(cls, message: AccountingMessage) -> Accounting:
        """Return the account of a message."""
        tiers: dict[str, int] = {}
        reasons: dict[str, int] = {}
        for count in message.tiers:
            tiers[count.tier] = tiers.get(count.tier, 0) + count.steps
            if count.why:
                reasons[count.why] = reasons.get(count.why, 0) + count.steps
        return cls(
            served={count.location: count.served for count in message.locations},
            written={count.location: count.written for count in message.locations if count.written},
            steps=message.steps,
            prompt_tokens=message.prompt_tokens,
            generated_tokens=message.generated_tokens,
            dtype=_name(message.dtype),
            kv_cache_dtype=_name(message.kv_cache_dtype),
            attention=message.attention,
            matmul=message.matmul,
            tiers=tiers,
            reasons=reasons,
            cached_tokens=message.cached_tokens,
        )


def _name(dtype: int) -> str:
    return DType.Name(dtype).removeprefix("DTYPE_").lower() if dtype else ""
