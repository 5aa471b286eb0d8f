"""Makes vLLM's worker hand out a tensor.

It uses a `worker_extension_cls`, called by `collective_rpc`; both are vLLM's own.
"""

from __future__ import annotations

from typing import Any

import torch


class StockTensor:
    """Mixed into vLLM's worker, which has the model's configuration, the device and the rank."""

    model_config: Any
    device: Any
    rank: int

    def stock_tensor(self, numbers: int) -> torch.Tensor | None:
        """Return a tensor [numbers] of the model's type on the CPU; None but on rank 0.

        The tensor is made on the model's device.
        """
        if self.rank:
            return None
        return torch.ones(numbers, dtype=self.model_config.dtype, device=self.device).cpu()
