"""The account of an invoke's run: where its block was served and wrote, in which dtypes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from executor.core.text import clip
from interpose.v1 import trace_pb2 as pb
from interpose.wire.arrays import dtype_of

MOST_REASONS = 16  # of a block, why steps ran in no better tier
LONGEST_REASON = 400


@dataclass(frozen=True)
class Precision:
    """How the engine computes.

    Attributes:
        dtype: of the activations.
        kv_cache_dtype: of the keys and values it keeps; those of the first attention layer.
        attention: names of its attention backends, in alphabetical order.
        matmul: how float32 matrices are multiplied, by torch's name.
    """

    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    attention: str
    matmul: str

    @classmethod
    def of(cls, config: Any) -> Precision:
        """Return that of an engine whose model has been loaded.

        Args:
            config: the engine's VllmConfig; its layers register themselves there.
        """
        layers = [
            layer
            for layer in config.compilation_config.static_forward_context.values()
            if hasattr(layer, "get_attn_backend")
        ]
        dtype = config.model_config.dtype
        kept = (getattr(layer, "kv_cache_torch_dtype", None) for layer in layers)
        return cls(
            dtype,
            next((one for one in kept if one is not None), dtype),
            ", ".join(sorted({layer.get_attn_backend().get_name() for layer in layers})),
            torch.get_float32_matmul_precision(),
        )


class Tally:
    """How often one block was at each location, and in which tiers its steps ran.

    Attributes:
        why: why the block's own code runs in the steps from now on, "" for no reason.
        cached_tokens: how many tokens of the prompt came from the prefix cache.
    """

    def __init__(self) -> None:
        self.why = ""
        self.cached_tokens = 0
        self._began = time.monotonic()
        self._ran: dict[tuple[str, str], int] = {}
        self._served: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._possible: list[tuple[str, torch.Tensor]] = []

    @property
    def writes(self) -> int:
        """How often the block wrote anywhere; waits for the device where only that knows."""
        self._resolve()
        return sum(self._written.values())

    def serve(self, location: str, times: int = 1) -> None:
        """The block is at a location, or was there in several steps."""
        self._served[location] = self._served.get(location, 0) + times

    def write(self, location: str, times: int = 1) -> None:
        """What the block changed at a location is in the model."""
        self._written[location] = self._written.get(location, 0) + times

    def ran(self, tier: str, steps: int = 1, why: str = "") -> None:
        """Steps of the request ran in a tier.

        Args:
            tier: "graph" for steps in the tables of captured graphs, "plan" for a plan at the hooks, "block" for the block's own
                code.
            steps: how many.
            why: why they ran in no better tier.
        """
        if not steps:
            return
        key = (tier, why)
        if key not in self._ran and len(self._ran) >= MOST_REASONS:
            key = (tier, "")
        self._ran[key] = self._ran.get(key, 0) + steps

    def may_write(self, location: str, differs: list[torch.Tensor]) -> None:
        """Note scalar booleans that say whether the block changed a value.

        Their device may still compute them.
        """
        self._possible.append((location, differs[0] if len(differs) == 1 else torch.stack(differs).any()))

    def _resolve(self) -> None:
        """Count what was only possible."""
        if self._possible:
            resolve([self])

    def accounting(
        self,
        invoke: int,
        steps: int,
        prompt_tokens: int,
        generated_tokens: int,
        precision: Precision,
        block_seconds: float = 0.0,
    ) -> pb.Accounting:
        """Return it as it travels.

        Args:
            block_seconds: for which forward passes waited for the block's code.
        """
        self._resolve()
        message = pb.Accounting(
            invoke=invoke,
            steps=steps,
            prompt_tokens=prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=generated_tokens,
            dtype=dtype_of(precision.dtype),  # type: ignore[arg-type]
            kv_cache_dtype=dtype_of(precision.kv_cache_dtype),  # type: ignore[arg-type]
            attention=precision.attention,
            matmul=precision.matmul,
            block_seconds=block_seconds,
            seconds=time.monotonic() - self._began,
        )
        for (tier, why), count in self._ran.items():
            message.tiers.add(tier=tier, steps=count, why=clip(why, LONGEST_REASON))
        idle = steps - sum(self._ran.values())
        if idle > 0:
            message.tiers.add(tier="idle", steps=idle)
        for location, served in self._served.items():
            message.locations.add(location=location, served=served, written=self._written.get(location, 0))
        return message


def resolve(tallies: Iterable[Tally]) -> None:
    """Count what was only possible for several blocks, all with one wait."""
    possible = [(tally, *one) for tally in tallies for one in tally._possible]
    if not possible:
        return
    made = torch.stack([differs for _, _, differs in possible]).tolist()
    for (tally, location, _), changed in zip(possible, made, strict=True):
        tally._possible.clear()
        if changed:
            tally.write(location)
