"""Attention probabilities, recomputed for one request from its queries and the cached keys.

The engine's attention kernels never hold the probabilities. So they are computed only when a block asks for them, with the
scale, grouped heads, causal mask, sliding window, soft cap, ALiBi and sinks of the layer.

The result is checked against the kernel: the probabilities times the cached values must give what the kernel returned for these
rows. Otherwise the pattern is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType

from executor.core.errors import Refusal
from executor.core.location import Kind
from executor.model.node import Node, View
from executor.model.rows import Rows
from executor.model.values import Served
from executor.views.cache import CachedKeys
from interpose.v1 import trace_pb2 as pb

PATTERN = str(Kind.PATTERN)
_LARGEST = 1 << 30  # bytes of one rank's part
_HINT = "use attn.rot_q, attn.rot_k and attn.z"


@dataclass(frozen=True, eq=False)
class Pattern(View):
    """A layer's attention probabilities, [heads, tokens, keys]; read only."""

    def read(self, served: Served) -> torch.Tensor:  # [heads, queries, keys]
        value: torch.Tensor = served.value
        return value

    def write(self, served: Served, value: object) -> None:
        served.assign(value)


class AttentionPattern:
    """Computes the pattern of one attention kernel.

    Args:
        node: the kernel's node.
    """

    def __init__(self, node: Node) -> None:
        assert isinstance(node.layer, Attention)
        self.needs: tuple[Node, ...] = ()
        self._node = node
        self._kernel: Attention = node.layer
        self._cache: CachedKeys | None = None

    def compute(self, given: tuple[Any, Any], returned: Any, rows: Rows, index: int) -> torch.Tensor:
        """Return the probabilities of a request's rows, [heads, tokens, keys].

        The dtype is the dtype of the queries.

        Raises:
            Refusal: this code cannot follow the kernel's arithmetic or its cache. Every rank raises the same error.
        """
        query: torch.Tensor = given[0][0]
        metadata = get_forward_context().attn_metadata
        mine = metadata.get(self._kernel.layer_name) if isinstance(metadata, dict) else None
        lengths = getattr(mine, "seq_lens", None)
        if lengths is None or getattr(mine, "block_table", None) is None:
            raise self._refusal("the attention backend does not say where its keys are")
        tokens, keys = rows.stop - rows.start, int(lengths[index])
        if self._kernel.num_heads * tokens * keys * 4 > _LARGEST:
            raise self._refusal(f"{tokens} by {keys} probabilities for each head are more than fit")
        why = ""
        pattern = query.new_zeros(self._kernel.num_heads, tokens, keys)
        try:
            pattern = self._probabilities(rows.of(query), rows.of(returned), mine.block_table[index], keys)  # type: ignore[union-attr]
        except ValueError as error:
            why = str(error)
        return self._whole(pattern.to(query.dtype), why)

    def _whole(self, pattern: torch.Tensor, why: str) -> torch.Tensor:
        """Return the heads of all ranks; refuse on every rank if one rank has no pattern.

        Args:
            pattern: the heads of this rank, [heads of the rank, tokens, keys].
            why: why this rank has no pattern; "" if it has a pattern.
        """
        if self._node.layouts.sharded:
            group = get_tp_group()
            failed = [torch.zeros(1) for _ in range(group.world_size)]
            dist.all_gather(failed, torch.tensor([float(bool(why))]), group=group.cpu_group)
            pattern = group.all_gather(pattern.contiguous(), dim=0)
            if any(bool(one) for one in failed):
                why = why or "another tensor-parallel rank could not compute its heads"
        if why:
            raise self._refusal(why)
        return pattern

    def _probabilities(
        self, query: torch.Tensor, output: torch.Tensor, blocks: torch.Tensor, keys: int
    ) -> torch.Tensor:  # query, output: [tokens, width]; blocks: [blocks]; returns [heads, tokens, keys]
        kernel, impl = self._kernel, self._kernel.impl
        if kernel.attn_type != AttentionType.DECODER:
            raise ValueError("the layer's attention is not causal")
        if self._cache is None:
            self._cache = CachedKeys(kernel)
        cached, values = self._cache.read(blocks, keys)  # [keys, kv heads, width]
        tokens, group = query.shape[0], kernel.num_heads // kernel.num_kv_heads
        query = query.reshape(tokens, kernel.num_heads, kernel.head_size).float()
        cached, values = (one.float().repeat_interleave(group, dim=1) for one in (cached, values))
        scores = torch.einsum("qhd,khd->hqk", query, cached) * impl.scale
        if soft_cap := getattr(impl, "logits_soft_cap", None) or getattr(impl, "logit_soft_cap", None):
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(keys - tokens, keys, device=query.device)[:, None] - torch.arange(
            keys, device=query.device
        )
        slopes = getattr(impl, "alibi_slopes", None)
        if slopes is not None:
            scores = scores - slopes.to(scores)[:, None, None] * distance
        window = kernel.sliding_window
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        scores = scores.masked_fill(~seen, float("-inf"))
        sinks = getattr(impl, "sinks", None)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, tokens, 1)], dim=-1)
        pattern = scores.softmax(dim=-1)[..., :keys]
        values = values.masked_fill(~seen.any(0)[:, None, None], 0)  # Freed blocks may hold any number.
        gave = output.reshape(tokens, kernel.num_heads, kernel.head_size_v).float()
        self._prove(torch.einsum("hqk,khd->qhd", pattern, values), gave, output.dtype)
        return pattern

    @staticmethod
    def _prove(mine: torch.Tensor, gave: torch.Tensor, dtype: torch.dtype) -> None:  # [tokens, heads, head size]
        tolerance = 1e-3 if dtype == torch.float32 else 5e-2
        if not bool((mine - gave).abs().max() <= tolerance * max(1.0, float(gave.abs().max()))):
            raise ValueError(
                "what the attention kernel returned is not what its queries, keys and values give by themselves"
            )

    def _refusal(self, why: str) -> Refusal:
        name = f"the attention pattern of {self._node.path}"
        return Refusal(
            pb.ERROR_CODE_UNKNOWN_LOCATION, f"{name} cannot be given: {why}; {_HINT}", location=self._node.path
        )
