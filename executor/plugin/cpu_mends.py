"""What vLLM's CPU build gets wrong, in plain requests too, and how its own options avoid it.

- With a prefix cache vLLM's Mamba 2 layers keep the state at the last edge of a cache block in a prompt. Their kernels on GPUs
  give it in the step of the whole prompt. The kernel on CPUs gives the state at the end of the step alone. The layer still takes
  it for the states at all edges, and the index that it makes of them ends the engine.
- The kernel on CPUs that rotates queries and keys takes them as `[tokens, heads * width]`. Latent attention gives it
  `[tokens, heads, width]`, of which it rotates the wrong numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

if TYPE_CHECKING:
    from vllm.v1.worker.cpu_worker import CPUWorker as _Base
else:
    _Base = object

_ROTARY = "rotary_embedding"


class CPUMends(_Base):
    """Mixed in before vLLM's worker on CPUs."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model; latent attention rotates with vLLM's PyTorch code, not with the kernel."""
        if self.model_config.is_deepseek_mla:
            compilation = self.vllm_config.compilation_config
            compilation.custom_ops = [one for one in compilation.custom_ops if one[1:] != _ROTARY] + [f"-{_ROTARY}"]
        return super().load_model(*args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return what each layer keeps in the cache.

        No layer gives a state in the middle of a step. vLLM's scheduler then ends a step at the edge, as it does for Gated
        DeltaNet, whose layers give no such state either.
        """
        return {
            name: replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
            if isinstance(spec, MambaSpec)
            else spec
            for name, spec in super().get_kv_cache_spec().items()
        }
