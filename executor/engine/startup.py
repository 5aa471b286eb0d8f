"""Starts vLLM's engine for a model, and warms it up."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from executor.cluster.start_failure import noted
from executor.cluster.verdicts import Verdicts
from executor.engine.compiler import Compiler
from executor.engine.openai_serving import OpenAIServing
from executor.engine.options import engine_options
from executor.engine.rpc import call_workers
from executor.engine.stat_logger import StatLogger
from executor.model.lora import Adapters
from executor.plan.row_values import RowValues
from executor.plugin.config import check_config, leave_untraced, prepare_environment, why_untraced
from interpose.v1 import model_pb2


class ModelSettings(Protocol):
    """What the engine needs of a model's settings; `serve_app.settings.ModelSettings` has it."""

    name: str
    model: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    placement: str
    engine: dict[str, Any]
    lora_modules: Mapping[str, str]
    limits: Any
    openai: dict[str, Any]


class Started(NamedTuple):
    """An engine that is ready.

    Attributes:
        llm: vLLM's engine.
        description: of the model, as clients get it.
        adapters: the model's LoRA adapters, which the engine has loaded.
        compiler: compiles the programs of traces.
        verdicts: the traces whose blocks had a worker ended.
        serving: answers requests of the OpenAI-compatible endpoint.
        row_values: which of the model's values have rows.
        why_untraced: why the engine takes no traces; "" if it does.
    """

    llm: AsyncLLM
    description: model_pb2.ModelDescription
    adapters: Adapters
    compiler: Compiler
    verdicts: Verdicts
    serving: OpenAIServing
    row_values: RowValues
    why_untraced: str = ""


async def started(model: ModelSettings, progress: Callable[[str], None], metrics: bool = False) -> Started:
    """Start the engine, load the model and run a first request.

    Args:
        progress: called with each stage's name.
        metrics: whether vLLM's own metrics go to Ray's agent.
    """
    progress("configuring")
    prepare_environment(model.tensor_parallel_size * model.pipeline_parallel_size)
    config = AsyncEngineArgs(**engine_options(model)).create_engine_config()
    check_config(config)
    why = why_untraced(config)
    if why:
        leave_untraced(config, why)
    progress("starting workers and loading the model")
    verdicts = Verdicts()
    # The constructor of AsyncLLM blocks until the workers are up, which takes minutes for a large model.
    loop = asyncio.get_running_loop()
    loggers: list[Any] | None = [StatLogger] if metrics else None
    with noted():
        llm = await loop.run_in_executor(None, lambda: AsyncLLM.from_vllm_config(config, stat_loggers=loggers))
    try:
        return (await _warm(model, llm, verdicts, progress))._replace(why_untraced=why)
    except BaseException:
        await loop.run_in_executor(None, llm.shutdown)
        raise


async def _warm(model: ModelSettings, llm: AsyncLLM, verdicts: Verdicts, progress: Callable[[str], None]) -> Started:
    progress("reading the module tree")
    described = await call_workers(llm, "interpose_describe")
    description = model_pb2.ModelDescription.FromString(described[0])
    description.name = model.name
    values = RowValues.of(description, (await call_workers(llm, "interpose_row_values"))[0])
    adapters = Adapters(model.lora_modules)
    description.adapters.extend(adapters.names)
    progress("warming up")
    for adapter in adapters.requests:
        if not await llm.add_lora(adapter):
            raise ValueError(f"the engine did not take the LoRA adapter {adapter.lora_name} from {adapter.lora_path}")
    # An engine's first request takes seconds longer than the next. So the engine runs one before the first trace comes.
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    async for _ in llm.generate({"prompt_token_ids": [0]}, params, f"warm-up-{uuid.uuid4().hex}"):
        pass
    serving = await OpenAIServing.start(llm, model.name, model.openai, adapters, model.limits.max_invokes)
    progress("ready")
    compiler = Compiler(model.limits.max_program_nodes)
    return Started(llm, description, adapters, compiler, verdicts, serving, values)
