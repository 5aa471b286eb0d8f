"""How vLLM is set up for traces: engine options, and the environment of its CPU platform.

Traces restrict the scheduler: first come first served. An option that contradicts this is refused. Tokens are guessed for plain
requests only (`executor.plugin.guesses`). With some options an engine serves plain requests and takes no traces: it is stock.
vLLM cuts, caches and evicts prompts as stock, and schedules steps ahead as stock. `executor.plugin.scheduler` keeps a traced
request whole, in the cache, and a step behind.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

from executor.model.kv_caches import PLAIN_CACHES
from executor.plugin.contract import VERSION
from executor.plugin.guesses import why_not_guessed

# Tokens of a step, unless the user sets another number; also the longest prompt that can be traced. vLLM's default is 2048.
STEP_TOKENS = 8192


def check_version() -> None:
    """Raise RuntimeError unless the installed vLLM is the version that the executor knows."""
    if vllm.__version__.split("+")[0] != VERSION:
        raise RuntimeError(f"interpose needs vLLM {VERSION}; this is {vllm.__version__}")


def prepare_environment(workers: int) -> None:
    """Set the environment variables that vLLM reads, where the user has not set them.

    Args:
        workers: how many workers the engine will have on this machine.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # vLLM's default where Triton is installed is 1
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // workers
        if workers > 1:
            # vLLM's own choice counts NUMA nodes and refuses more ranks than there are nodes. Threads of ranks wait for each
            # other without sleep. So with fewer cores than ranks, each rank has one thread and shares its core with other
            # ranks.
            shares = [cores[i * share : (i + 1) * share] or [cores[i % len(cores)]] for i in range(workers)]
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, one)) for one in shares))


def worker_settings(
    limits: Any,
    outbox: str = "ray",
    placement: str = "PACK",
    plans: bool = False,
    graphs: bool = False,
    sandbox: bool = False,
    sandbox_plans: bool = False,
) -> dict[str, Any]:
    """Return what the executor and its workers read from `additional_config["interpose"]`.

    Args:
        limits: the model's limits.
        outbox: "ray", or "local" for an engine without Ray.
        placement: Ray's strategy for placing the workers; the placement group of a Serve replica overrides it.
        plans: whether steps of blocks run as plans where they can (`executor.plan`).
        graphs: whether loops run in the tables where they can, on GPUs in captured graphs (`executor.graphs`). Needs `plans`.
        sandbox: whether blocks of tenants without trust run in sandboxed processes (`executor.sandbox`).
        sandbox_plans: whether steps of these blocks run as plans in the worker. Needs `plans`.
    """
    return {
        "outbox": outbox,
        "placement": placement,
        "step_seconds": limits.step_seconds,
        "block_memory_bytes": limits.block_memory_bytes,
        "inline_bytes": limits.inline_bytes,
        "max_saved_bytes": limits.max_saved_bytes,
        "plans": plans,
        "graphs": plans and graphs,
        "sandbox": sandbox,
        "sandbox_plans": plans and sandbox and sandbox_plans,
    }


def trace_options(
    limits: Any,
    outbox: str = "ray",
    placement: str = "PACK",
    plans: bool = False,
    graphs: bool = False,
    sandbox: bool = False,
    sandbox_plans: bool = False,
) -> dict[str, Any]:
    """Return the engine options that traces need, whatever the model and the executor.

    Args:
        limits, outbox, placement, plans, graphs, sandbox, sandbox_plans: as of `worker_settings`.
    """
    worker = "worker_cpu.InterposeCPUWorker" if current_platform.is_cpu() else "worker_gpu.InterposeGPUWorker"
    return {
        "worker_cls": f"executor.plugin.{worker}",
        "scheduler_cls": "executor.plugin.scheduler.InterposeScheduler",
        "additional_config": {
            "interpose": worker_settings(limits, outbox, placement, plans, graphs, sandbox, sandbox_plans)
        },
    }


# Options with which an engine serves plain requests, and refuses traces as they come.
_LATENT = "latent attention (MLA) on CPUs with AMX"
_WITHOUT_TRACES = ("speculative_config", "enable_expert_parallel", "kv_cache_dtype", _LATENT)


def check_config(config: Any) -> None:
    """Refuse an engine whose batches do not have one row for each token, whole on every rank.

    Args:
        config: the engine's VllmConfig.

    Raises:
        ValueError: with the option and the reason.
    """
    for name, why in _reasons(config).items():
        if name not in _WITHOUT_TRACES:
            raise ValueError(f"{name} is not supported with traces: {why}")


def why_untraced(config: Any) -> str:
    """Return why an engine serves plain requests only; "" if it takes traces.

    Args:
        config: the engine's VllmConfig, which `check_config` has passed.
    """
    reasons = [f"{name} is not supported with traces: {why}" for name, why in _reasons(config).items()]
    return "; ".join(reasons)


def leave_untraced(config: Any, why: str) -> None:
    """Give an engine vLLM's own scheduler, runner and worker, with a description beside them.

    Args:
        config: the engine's VllmConfig, which is changed.
        why: why it takes no traces.
    """
    worker = "PlainCPUWorker" if current_platform.is_cpu() else "PlainGPUWorker"
    module = "worker_plain_cpu" if current_platform.is_cpu() else "worker_plain_gpu"
    config.parallel_config.worker_cls = f"executor.plugin.{module}.{worker}"
    config.scheduler_config.scheduler_cls = None
    config.additional_config["interpose"] = {**config.additional_config.get("interpose", {}), "untraced": why}


def _reasons(config: Any) -> dict[str, str]:
    """Return the options that contradict traces, each with the reason."""
    parallel = config.parallel_config
    scheduling = config.scheduler_config
    stages = parallel.pipeline_parallel_size
    guessing = config.speculative_config
    refused = {
        "speculative_config": (guessing is not None, why_not_guessed(guessing, stages, config.use_v2_model_runner)),
        "scheduling_policy": (scheduling.policy != "fcfs", "which request is evicted must not depend on priorities"),
        "long_prefill_token_threshold": (scheduling.long_prefill_token_threshold > 0, "a traced prompt is never cut"),
        "data_parallel_size": (parallel.data_parallel_size > 1, "use several replicas instead"),
        "enable_expert_parallel": (parallel.enable_expert_parallel, "experts' rows are spread over ranks"),
        "lora_modules": (
            stages > 1 and config.lora_config is not None,
            "with pipeline_parallel_size > 1 adapters have not been shown to be right; use tensor_parallel_size",
        ),
        "enable_dbo": (parallel.use_ubatching, "a step would run in parts"),
        "enable_batch_sharded_sampling": (
            parallel.enable_batch_sharded_sampling,
            "a rank would have the logits of some requests only",
        ),
        "kv_sharing_fast_prefill": (
            config.cache_config.kv_sharing_fast_prefill,
            "later layers would not run for a prompt's first rows",
        ),
        "kv_cache_dtype": (
            config.cache_config.cache_dtype not in PLAIN_CACHES,
            f"what blocks leave in such a cache cannot be checked; it can be in {', '.join(PLAIN_CACHES)}",
        ),
        "prefill_context_parallel_size": (
            parallel.prefill_context_parallel_size > 1,
            "a prompt's rows are spread over ranks",
        ),
        "decode_context_parallel_size": (parallel.decode_context_parallel_size > 1, "a sequence is spread over ranks"),
        "fully_sharded_loras": (
            config.lora_config is not None and config.lora_config.fully_sharded_loras,
            "adapters' outputs are cut as the layers' are",
        ),
        "lora_dtype": (
            config.lora_config is not None
            and not current_platform.is_cpu()
            and config.lora_config.lora_dtype not in (torch.float16, torch.bfloat16),
            "vLLM's kernels for adapters on GPUs take half precision; serve the model with dtype bfloat16 or float16",
        ),
        "language_model_only=False": (
            config.model_config.uses_mrope and _takes_images(config.model_config),
            "of images each token has several positions, which have not been shown to be right; serve the model for text, with "
            "--language-model-only",
        ),
        _LATENT: (
            current_platform.is_cpu() and config.model_config.use_mla and torch.cpu._is_amx_tile_supported(),
            "vLLM has other kernels for it there, which have not been compared with transformers; serve it on GPUs, or on CPUs "
            "without AMX",
        ),
        "runner": (config.model_config.runner_type != "generate", "traces need a model that generates"),
        "VLLM_USE_V2_MODEL_RUNNER=1": (
            current_platform.is_cpu() and config.use_v2_model_runner,
            "on CPUs blocks run in the V1 runner; set it to 0",
        ),
    }
    return {name: why for name, (bad, why) in refused.items() if bad and why}


def _takes_images(model_config: Any) -> bool:
    """Return whether prompts may hold more than text."""
    images = model_config.multimodal_config
    return images is not None and not images.language_model_only
