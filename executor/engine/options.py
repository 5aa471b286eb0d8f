"""The engine options of a served model.

They come from the user's own options, from what traces need, and from the executor that places the workers on the cluster.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms import current_platform

from executor.cluster.executor import LazyRayExecutor
from executor.model.lora import Adapters
from executor.plugin.config import STEP_TOKENS, check_version, trace_options

# With any of these options the user has decided whether the engine compiles.
_COMPILING = (
    *("enforce_eager", "compilation_config", "optimization_level"),
    *("cudagraph_capture_sizes", "max_cudagraph_capture_size"),
)


def engine_options(model: Any) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs for a model's settings.

    Raises:
        ValueError: a setting contradicts what traces need.
    """
    check_version()
    options: dict[str, Any] = dict(model.engine)
    for name in ("worker_cls", "scheduler_cls", "distributed_executor_backend", "additional_config"):
        if name in options:
            raise ValueError(f"{name} is the system's own and cannot be set")
    if (
        current_platform.is_cpu()
        and "gpu_memory_utilization" not in options
        and "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    ):
        options.setdefault("kv_cache_memory_bytes", 1 << 30)
    if current_platform.is_cpu() and all(options.get(name) is None for name in _COMPILING):
        options["enforce_eager"] = True  # Compiling takes minutes, and a step with a block runs uncompiled.
    options.setdefault("max_num_batched_tokens", STEP_TOKENS)
    options.setdefault("served_model_name", model.name)  # the label of vLLM's metrics
    return {
        **options,
        **Adapters(model.lora_modules).options(options),
        # On a CPU there are no graphs, and tables cost more than plans at the hooks.
        **trace_options(
            model.limits,
            placement=model.placement,
            plans=model.plans,
            graphs=model.graphs and not current_platform.is_cpu(),
            sandbox=model.sandbox == "on",
            sandbox_plans=model.sandbox_plans,
        ),
        "model": model.model,
        "tensor_parallel_size": model.tensor_parallel_size,
        "pipeline_parallel_size": model.pipeline_parallel_size,
        "distributed_executor_backend": LazyRayExecutor,
        "disable_log_stats": options.get("disable_log_stats", True),
    }
