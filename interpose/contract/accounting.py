"""What a trace is told about its run: where its block was, where it wrote, and in what precision the model ran."""

from __future__ import annotations

from dataclasses import dataclass, field

from interpose.v1.trace_pb2 import Accounting as AccountingMessage
from interpose.v1.value_pb2 import DType


@dataclass(frozen=True)
class Accounting:
    """What one invoke did, however it ended.

    Attributes:
        served: how often the block was at each location, e.g. `served["model.layers.2.output"]`, in the order it first was.
        written: how often what it changed there went into the model.
        steps: how many steps of the generation it took part in; the prompt is the first.
        prompt_tokens, generated_tokens: of its request.
        dtype: of the activations, e.g. "bfloat16".
        kv_cache_dtype: of the keys and values that the engine keeps.
        attention: the engine's attention backends, e.g. "FLASH_ATTN".
        matmul: how float32 matrices are multiplied: "highest", "high" (TF32) or "medium" (bfloat16).
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

    @classmethod
    def of(cls, message: AccountingMessage) -> Accounting:
        """Return it from the form it travels in."""
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
        )


def _name(dtype: int) -> str:
    return DType.Name(dtype).removeprefix("DTYPE_").lower() if dtype else ""
